"""The CPU: C kernels, the tapes that record and replay them, and collectives in shared memory."""
