"""One attention interface, several backends."""
