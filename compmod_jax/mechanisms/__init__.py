"""The mechanisms, one idea a file: pure functions, and thin modules that only hold parameters."""
