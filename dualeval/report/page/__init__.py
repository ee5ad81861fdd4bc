"""The page of a finished run: its content, charts and HTML. Begin with ``page.py``.

Pictures of samples come from the task's ``show``, asked for in ``content.py``; charts are of ``charts.py``.
Callers: session at the end of a run, ``dualeval report``. Keep: one file that asks for nothing else; texts
escaped.
"""
