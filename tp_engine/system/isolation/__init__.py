"""Functions that may take too long, need too much memory, or crash, called in processes of their own.  No torch."""
