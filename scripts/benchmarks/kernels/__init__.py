"""The arguments of each kernel, and the bytes that it must move."""
