"""What all collectives share: the linear map and its derivatives, the call, reductions, groups, errors."""
