"""The output folder of a run: opened, held, filled by the journal, and finished."""
