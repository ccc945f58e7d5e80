"""How a training begins: new, resumed, from other weights, or as the next stage."""
