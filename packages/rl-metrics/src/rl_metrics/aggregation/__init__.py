"""How the tokens of a step become one loss: masks, denominators, units and scale."""
