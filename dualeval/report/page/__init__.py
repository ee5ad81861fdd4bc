"""The page of a finished run: its content, charts and HTML. Begin with ``page.py``."""
