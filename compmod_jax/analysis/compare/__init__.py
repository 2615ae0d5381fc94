"""Two trained models side by side: measured and reported."""
