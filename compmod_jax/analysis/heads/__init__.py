"""What competing heads and experts do: measured, drawn, and reported."""
