"""The report of a run: numbers, figures, text, page."""
