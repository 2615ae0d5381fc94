"""What a model loses without some of its units: measured and reported."""
