"""Other people's engines with our model inside."""
