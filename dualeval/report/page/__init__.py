"""The page of a finished run: what it says (content.py) and how it looks (html.py)."""
