"""This process and its machine: environment, log, files, threads, children, memory, and calls that may die."""
