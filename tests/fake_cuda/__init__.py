"""A node of GPUs that do not exist, and the jobs that run on it (``scripts/test_fake_gpus``).

``runtime/``  a CUDA runtime, NCCL and driver over the host's memory, which every process of a job preloads
``device.py``  operations of torch and launches of Triton on that memory
``node.py``  builds the runtime, and describes a node to it
``logs.py``  what the log of every process must show, whatever the job
``jobs.py``  the table of jobs, with the part of the CUDA path that each one covers
``programs.py``  what a job runs, and on the CPU to know its tokens
"""
