"""A request as plain data: its parameters, what rank 0 gets, and what the caller gets back."""
