"""The published tables that `train.reproduce` makes again."""
