"""Shared by all collectives: the linear map and its derivatives, the call, reductions, groups, errors."""
