"""How answers are made: many at a time, also for environments that ask the model themselves."""
