"""What a model is and costs: diagrams, parameters, FLOPs, compiled programs."""
