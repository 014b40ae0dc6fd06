"""What decides whether a job of CI passes: figures with their error, verdicts, and reports for people and programs."""
