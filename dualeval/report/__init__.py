"""How a run and its result are shown to people; reads a Result and knows no engine."""
