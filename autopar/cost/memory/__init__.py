"""What lives on one device at each moment of a step: what the prediction and the solver's rows share."""
