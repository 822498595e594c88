"""Models of the protocols between ranks (flags, epochs, buffers, resident blocks), explored exhaustively."""
