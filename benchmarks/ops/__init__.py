"""The ops that are measured: a new one adds a file here and a line to the table of sections.py."""
