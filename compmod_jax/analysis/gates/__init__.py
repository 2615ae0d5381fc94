"""What the gates of a modulated model let pass: measured, drawn, and reported."""
