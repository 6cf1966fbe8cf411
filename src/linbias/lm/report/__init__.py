"""What a run leaves to read: its records, findings, figures and page."""
