"""Mutants of what proves programs right: the check against one process, and by finite differences."""

from mutants.mutant import Mutant

VERDICTS = "tests/testing/test_verdicts.py"
LAYOUTS = "tests/testing/test_layouts.py"
REPORTS = "tests/testing/test_reports.py"
DIFFERENCES = "tests/testing/test_check_gradients.py"

ROWS = "assert_matches_single_process"
RIGHT = f"{VERDICTS}::test_a_right_program_is_right"
WRONG = f"{VERDICTS}::test_a_wrong_program_is_caught"
WAYS = f"{LAYOUTS}::test_a_right_way_is_right"
ARGUMENTS = f"{REPORTS}::test_a_wrong_argument"
OBSERVED = f"{REPORTS}::test_an_observation"
BATCH_NORM = f"{VERDICTS}::test_a_bias_before_batch_norm_in_single_precision"
RARE = f"{VERDICTS}::test_rare_rows_of_one_rank_and_of_a_sharded_program"
ORDER = f"{VERDICTS}::test_rows_in_another_order_hide_local_statistics"
TIED = f"{VERDICTS}::test_tied_parameters_buffers_and_integers"
REDUCED = f"{VERDICTS}::test_who_has_reduced"
UNCHECKED = f"{REPORTS}::test_a_tensor_whose_gradient_nothing_would_check"

COMPARE, LAYOUT = "testing/harness/compare.py", "testing/harness/layout.py"
MATCHING, RANK = "testing/harness/matching.py", "testing/harness/rank.py"
STEPS = "testing/harness/differences.py"

MUTANTS = [
    # what an error is relative to, and how large it may be
    Mutant(
        COMPARE,
        "tolerance_of",
        "10 * eps ** (2 / 3)",
        "10 * eps ** (1 / 3)",
        ROWS,
        f"{REPORTS}::test_a_computation_of_lower_precision",
    ),
    Mutant(COMPARE, "tolerance_of", "8 * eps if", "0.5 * eps if", ROWS, f"{VERDICTS}::test_other_dtypes -k bfloat"),
    Mutant(COMPARE, "Quantity._units", 'self.group in ("gradient", "second order") and', "False and", ROWS, RARE),
    Mutant(
        COMPARE,
        "_gradients",
        "SMALL * largest(*of_whole)",
        "largest(*of_whole)",
        ROWS,
        f"{WRONG} -k 'tiny or small'",
    ),
    Mutant(MATCHING, "Matching.run", "max(least, min(10 * noise", "min(least, max(10 * noise", ROWS, BATCH_NORM),
    Mutant(
        MATCHING,
        "Matching.run",
        "max(least, min(10 * noise.get(q.what, 0.0), _DOUBT * least))",
        "_DOUBT * least",
        ROWS,
        BATCH_NORM,
    ),
    Mutant(
        COMPARE,
        "Quantity.right",
        "(c.errors <= tolerance[c.index]).all()",
        "(c.errors <= tolerance[c.index]).double().mean() > 0.5",
        ROWS,
        RARE,
    ),
    # what is compared with what
    Mutant(COMPARE, "Quantity.combined", "if s != r]", "]", ROWS, f"{RIGHT} -k clip"),
    Mutant(COMPARE, "Quantity.combined", "[totals[s]", "[totals[r]", ROWS, f"{RIGHT} -k clip"),
    Mutant(
        COMPARE,
        "_gradients",
        "Piece(setting.index[name][r],",
        "Piece(setting.index[name][0],",
        ROWS,
        f"{RIGHT} -k clip",
    ),
    Mutant(
        COMPARE, "_gradients", "all(m.second for m in (whole, *each))", "False", ROWS, f"{WRONG} -k 'second and order'"
    ),
    Mutant(
        COMPARE,
        "_state",
        "for r, m in enumerate(each)]",
        "for r, m in enumerate(each[:1])]",
        ROWS,
        f"{WRONG} -k buffer",
    ),
    Mutant(COMPARE, "_state", "or changed or not q.ok", "or changed", ROWS, f"{WRONG} -k frozen"),
    Mutant(COMPARE, "_state", "wanted = wanted - before", "pass", ROWS, f"{RIGHT} -k step"),
    Mutant(COMPARE, "_together", "return every.sum(0)", "return wanted", ROWS, f"{WRONG} -k count"),
    Mutant(
        COMPARE,
        "quantities",
        "scale_of(q, q.ratio(q.compared)) is not None",
        "True",
        ROWS,
        f"{VERDICTS}::test_a_value_that_is_off_while_gradients_are_right",
    ),
    Mutant(COMPARE, "quantities", "all(q.ok for q in gradients)", "True", ROWS, f"{REPORTS}::test_which_reduction"),
    Mutant(MATCHING, "Matching._weighted", "math.prod(means) * weight", "weight", ROWS, f"{RIGHT} -k batch"),
    Mutant(
        RANK,
        "weight_of",
        "numbers(tuple(y.shape), y.dtype, i,",
        "numbers(tuple(y.shape), y.dtype, 0,",
        ROWS,
        f"{VERDICTS}::test_outputs_of_one_shape_whose_gradients_are_exchanged",
    ),
    Mutant(
        RANK,
        "Machines.run",
        'if kind == "simulated":',
        'if kind in ("simulated", "gloo"):',
        ROWS,
        f"{VERDICTS}::test_right_on_simulated_ranks_and_wrong_on_processes",
    ),
    Mutant(RANK, "measured", "own = any(", "own = False and any(", ROWS, f"{RIGHT} -k step"),
    Mutant(
        "testing/harness/report.py",
        "Report.ok",
        "all(table.ok for table in self.tables)",
        "self.tables[0].ok",
        ROWS,
        f"{REPORTS}::test_a_function_that_raises",
    ),
    Mutant(
        "testing/harness/report.py",
        "Table.ok",
        "not self.raised and all(",
        "all(",
        f"{ROWS} errors",
        f"{REPORTS}::test_a_function_that_raises",
    ),
    Mutant(
        "testing/harness/batch.py",
        "refuse_equal",
        "if same or (",
        "if (",
        f"{ROWS} errors",
        f"{ARGUMENTS} -k equal",
    ),
    Mutant(
        "testing/harness/batch.py", "refuse_equal", "moved = permuted and", "moved = False and", f"{ROWS} errors", ORDER
    ),
    Mutant(
        "testing/harness/batch.py",
        "_same_but_for_order",
        "(ordered(a), ordered(-1.0 * a))",
        "(ordered(a),)",
        f"{ROWS} errors",
        ORDER,
    ),
    Mutant(
        STEPS,
        "Checking.__init__",
        "dict(enumerate(own[:r]))",
        "{}",
        "check_gradients errors",
        f"{DIFFERENCES} -k 'equal or argument'",
    ),
    Mutant(RANK, "_refuse_others", "    if left:\n", "    if False:\n", f"{ROWS} check_gradients errors", UNCHECKED),
    Mutant(
        MATCHING,
        "Matching._refuse_nothing",
        "and trained and not any(",
        "and trained and False and any(",
        f"{ROWS} errors",
        f"{ARGUMENTS} -k unused",
    ),
    Mutant(
        MATCHING,
        "Matching.run",
        "if not setting.whole.own_backward and any(",
        "if False and any(",
        f"{ROWS} errors",
        f"{ARGUMENTS} -k constant",
    ),
    Mutant(MATCHING, "Matching.run", "m.outputs[i].numel() != 1", "False", ROWS, f"{WRONG} -k 'rows and number'"),
    Mutant(
        "testing/harness/cuts.py",
        "recorded",
        " and not _is_intended(frame)",
        "",
        ROWS,
        "tests/testing/test_testing_note.py",
    ),
    Mutant(
        "testing/harness/cuts.py",
        "recorded",
        "_COLLECTIVES.get(frame.f_code) if event",
        "None if event",
        ROWS,
        f"{REPORTS}::test_the_line_of_a_collective_that_torch_wraps",
    ),
    Mutant(
        "testing/harness/packing.py",
        "Packed",
        "    def unpack(self)",
        "    @__import__('functools').cache\n    def unpack(self)",
        ROWS,
        f"{RIGHT} -k batch",
    ),
    # which numbers each rank holds
    Mutant(
        LAYOUT,
        "Ranks.at",
        "in reversed(self.sizes.items()):",
        "in self.sizes.items():",
        "sharded",
        f"{RIGHT} -k 'data_and'",
    ),
    Mutant(
        LAYOUT, "_piece", "most = -(-x.shape[dim] // n)", "most = x.shape[dim] // n", "sharded", f"{RIGHT} -k uneven"
    ),
    Mutant(LAYOUT, "_blocks", "sum(lengths[: peers.index(r)])", "0", "sharded", f"{RIGHT} -k mlp"),
    Mutant(LAYOUT, "Code.read", "digit * self.base**step for", "digit for", "sharded", f"{WAYS} -k bfloat16"),
    Mutant(LAYOUT, "Code._offset", "self.base**self.digits // 2", "0", "sharded", f"{WAYS} -k bfloat16"),
    Mutant(
        LAYOUT,
        "code_of",
        "min(exact, 2**24) if 2 * total <= 2**24 else exact",
        "2**24",
        "sharded",
        f"{WAYS} -k bfloat16",
    ),
    Mutant(
        LAYOUT, "FreshIsNan.__torch_function__", "x.detach().fill_(math.nan)", "pass", "sharded", f"{LAYOUTS} {REPORTS}"
    ),
    Mutant(LAYOUT, "tensors_of", "remove_duplicate=False", "remove_duplicate=True", "sharded", f"{WAYS} -k tied"),
    Mutant(LAYOUT, "unwrapped", "inner = part ==", "inner = False and part ==", "sharded", LAYOUTS),
    Mutant(LAYOUT, "settled", "if len(known) != len(", "if False and len(", "sharded errors", f"{REPORTS} -k twice"),
    Mutant(
        LAYOUT,
        "settled",
        "if span.trained and",
        "if False and",
        "sharded errors",
        f"{REPORTS}::test_a_wrong_shard",
    ),
    Mutant(LAYOUT, "held_on_rank", "[each.process_group] if", "[] if", "sharded", REDUCED),
    Mutant(LAYOUT, "settled", "if ranks.axes_of(group) is None:", "if False:", "sharded errors", REDUCED),
    Mutant(COMPARE, "Setting.sum_of", "(of_input or a in axes)", "a in axes", "sharded", f"{RIGHT} -k data_and"),
    Mutant(COMPARE, "Setting.sum_of", "axis not in split and", "", "sharded", f"{RIGHT} -k 'fully or experts'"),
    Mutant(COMPARE, "_gradients", "{*reduced, *setting.asked.reduced}", "reduced", "sharded", REDUCED),
    Mutant(
        COMPARE,
        "Setting.sum_of",
        "axes += [axis for axis in partial_axes(said) if axis not in axes]",
        "pass",
        "sharded",
        f"{RIGHT} -k 'later or pipeline'",
    ),
    Mutant(
        RANK, "_gradient", "g = g.redistribute(x.device_mesh, x.placements)", "pass", "sharded", f"{WAYS} -k sequence"
    ),
    Mutant(
        "testing/harness/submodules.py",
        "_differs",
        "wanted.dim() > 1 and _same_rows(",
        "False and _same_rows(",
        ROWS,
        f"{REPORTS}::test_right_submodules_are_not_named",
    ),
    Mutant(
        "testing/harness/submodules.py",
        "_words",
        "x - (n - 1) * bias",
        "x - n * bias",
        "sharded",
        f"{OBSERVED} -k bias",
    ),
    # finite differences
    Mutant(
        STEPS,
        "_central",
        "(8 * (plus - minus) - (plus2 - minus2)) / (12 * h)",
        "(plus - minus) / (2 * h)",
        "check_gradients",
        f"{DIFFERENCES}::test_a_smooth_function_that_varies_fast_has_no_kink",
    ),
    Mutant(
        STEPS,
        "Checking._directions",
        "_STEP * (largest(x) or 1.0)",
        "_STEP",
        "check_gradients",
        f"{DIFFERENCES}::test_tensors_of_different_sizes",
    ),
    Mutant(
        STEPS,
        "Checking._differences",
        "d.rank == r or self._names[d.leaf] in self._said",
        "True",
        "check_gradients",
        f"{DIFFERENCES}::test_the_gradients_of_every_collective -k all_gather",
    ),
    Mutant(STEPS, "Difference.allowed", "-1.0 if self.kink else", "", "check_gradients", f"{DIFFERENCES} -k kink"),
    Mutant(STEPS, "differences", "and bend2 < 3 * bend", "", "check_gradients", f"{DIFFERENCES} -k 'fast or beside'"),
    Mutant(RANK, "losses_along", "seed_rank(0, rank)", "pass", "check_gradients", f"{DIFFERENCES} -k random"),
    Mutant(
        STEPS,
        "Checking._differences",
        "if self._once else 1",
        "if False else 1",
        "check_gradients",
        f"{DIFFERENCES} -k shared",
    ),
    Mutant(
        STEPS,
        "Checking._first_order",
        "partial_axes(self._said.get(name))",
        "()",
        "check_gradients",
        f"{DIFFERENCES} -k shared",
    ),
    Mutant(
        STEPS,
        "Checking._refuse_imprecise",
        "if hidden:",
        "if False:",
        "check_gradients errors",
        f"{DIFFERENCES}::test_large_losses",
    ),
    Mutant(
        STEPS,
        "Checking._candidates",
        "[v.rank for v, _ in held]",
        "[0] * len(held)",
        "check_gradients",
        f"{DIFFERENCES}::test_a_wrong_rule_is_observed",
    ),
]
