"""Rules over results; pure."""
