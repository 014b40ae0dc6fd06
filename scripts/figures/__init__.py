"""The README's table: engines side by side, measured and written into the documents (scripts/readme_figures)."""
