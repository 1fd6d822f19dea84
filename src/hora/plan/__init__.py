"""Know the time, the memory and the price of a training before renting the cluster."""
