"""``tp-engine run-batch`` and ``run_batch``: run files of OpenAI batch requests, and resume them."""
