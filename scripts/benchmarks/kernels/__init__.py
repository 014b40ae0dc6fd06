"""What each kernel is launched with, and the bytes that it must move."""
