"""The job: who its ranks are and where, how far each has come, and the record of an end that was not planned."""
