"""The token tile that plans and programs share; importing it needs no compiler."""

TM = 16  # tokens of a block: one m16 row tile of the tensor cores
