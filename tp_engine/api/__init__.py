"""The Python interface, ``LLM``, ``AsyncLLM`` and ``run_batch``, and the requests and answers of the OpenAI API."""
