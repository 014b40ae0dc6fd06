"""Hours of use in minutes: random load, random trouble, and everything that must still add up afterwards."""
