"""Programs that train, evaluate and use the models of compmod_jax."""
