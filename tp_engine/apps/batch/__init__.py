"""``tp-engine run-batch`` and ``run_batch``: files of OpenAI batch requests, run to the end and continued."""
