"""The soak: random load and random faults for some minutes, then checks of answers and resources."""
