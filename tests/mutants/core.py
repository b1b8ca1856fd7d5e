"""Mutants of the rules that all collectives share, of their modes, and of what is checked before anything is sent."""

from mutants.mutant import Mutant

TABLE = "tests/test_rules.py::test_the_table_in_simulated_worlds -k"
PENDING = "tests/core/test_pending.py::"
JOINT = "tests/core/test_joint.py::"
CHECKS = "tests/core/test_checks.py::"
MODES = "tests/core/test_modes.py::"
COMPILED = "tests/core/test_compiled.py::"
WRONG = "tests/test_bad_input.py::test_wrong_arguments -k rules"

ALL_PENDING, ALL_COMPILED = "tests/core/test_pending.py", "tests/core/test_compiled.py"
DISAGREEMENTS = "tests/test_disagreements.py"

MUTANTS = [
    # backward
    Mutant(
        "core/moves.py",
        "_begin",
        "x.resolve_conj().resolve_neg()",
        "x.resolve_neg()",
        "law complex",
        "tests/test_dtypes.py::test_lazy_conjugates",
    ),
    Mutant(
        "core/moves.py",
        "_begin",
        "if x.is_conj() or x.is_neg() or is_transformed(x)",
        "if x.is_conj() or is_transformed(x)",
        "law",
        "tests/test_dtypes.py::test_lazy_conjugates",
    ),
    # second order: what is recorded in a backward
    Mutant(
        "core/joint.py",
        "_Link.backward",
        "ctx.chain() if torch.is_grad_enabled() else None",
        "None",
        "second_order joint_backward",
        f"{JOINT}test_second_order",
    ),
    # forward mode
    Mutant(
        "core/torch_private/transforms.py",
        "apply_rule",
        "x.requires_grad or (forward_ad._current_level >= 0 and not is_batched_by_autograd(x))",
        "x.requires_grad",
        "forward_mode",
        "tests/test_nests.py::test_forward_ad_around_transforms_and_backward",
    ),
    Mutant(
        "core/moves.py",
        "_begin",
        "x = x.clone()",
        "pass",
        "forward_mode",
        "tests/engines/test_layouts.py::test_zeros_without_memory",
    ),
    # vmap
    Mutant(
        "core/arguments.py",
        "Call.dim",
        "return value % n",
        "return value",
        "vmap",
        "tests/test_rules.py::test_in_simulated_worlds -k 'vmap_is_a_loop and all_gather'",
    ),
    # transforms, checkpoints and modes around a collective
    Mutant(
        "core/moves.py",
        "_begin",
        " or is_transformed(x)",
        "",
        "transforms",
        f"{COMPILED}test_tensors_left_by_a_transform",
    ),
    Mutant(
        "core/torch_private/tracing.py",
        "unobserved",
        "with temporarily_clear_interpreter_stack():",
        "with contextlib.nullcontext():",
        "transforms check_mode",
        f"{CHECKS}test_within_transforms",
    ),
    Mutant(
        "core/torch_private/tracing.py",
        "unobserved",
        "for mode in reversed(dispatched):",
        "for mode in dispatched:",
        "transforms",
        f"{MODES}test_modes_see_nothing_inside_a_collective",
    ),
    Mutant(
        "core/pending.py",
        "Pending.__init__",
        " or not is_recomputing()",
        " or True",
        "transforms async_op",
        f"{PENDING}test_checkpoints_that_stop_before_the_wait",
    ),
    # compiled graphs
    Mutant(
        "core/torch_private/compiler.py",
        "keep_in_order",
        "definition.register_effect(_EffectType.ORDERED)",
        "pass",
        "compile",
        f"{COMPILED}test_inductor_keeps_the_order_of_the_program",
    ),
    Mutant(
        "core/torch_private/compiler.py",
        "keep_in_order",
        'if last is not None and hasattr(graph, "additional_star_deps")',
        "if last is None",
        "compile",
        f"{COMPILED}test_inductor_keeps_the_order_of_the_program",
    ),
    Mutant(
        "core/torch_private/compiler.py",
        "keep_in_checkpoints",
        "checkpoint.SAC_IGNORED_OPS.add(op)",
        "pass",
        "compile transforms",
        f"{COMPILED}test_checkpoints_keep_the_results_of_collectives",
    ),
    Mutant(
        "core/groups.py",
        "engine_named",
        "elif key_in_graphs(engine) != key:",
        "elif False:",
        "compile one_group",
        f"{COMPILED}test_a_graph_refuses_to_run_where_it_would_be_wrong",
    ),
    Mutant(
        "core/groups.py",
        "_facts_of",
        "if is_differentiating():",
        "if False:",
        "compile",
        f"{COMPILED}test_groups_meshes_transforms_and_messages",
    ),
    # arguments: a wrong one is an error on its own rank before anything is sent
    Mutant("core/arguments.py", "Call.dim", "-n <= value < n", "-n <= value <= n", "arguments", WRONG),
    Mutant("core/arguments.py", "Call.root", "0 <= value < self", "value < self", "arguments", WRONG),
    Mutant("core/arguments.py", "Call.sizes_of_parts", "if length % n:", "if length < n:", "arguments", WRONG),
    Mutant(
        "core/arguments.py",
        "Call.sizes_of_parts",
        "sum(sizes) != length",
        "sum(sizes) > length",
        "arguments sizes split",
        WRONG,
    ),
    Mutant(
        "core/arguments.py",
        "Call.sizes_of_all",
        "sizes[rank] != length",
        "sizes[rank] > length",
        "arguments sizes gather",
        WRONG,
    ),
    Mutant("core/arguments.py", "Call._sizes", "any(size < 0 for", "any(size < -1 for", "arguments sizes", WRONG),
    Mutant(
        "core/arguments.py",
        "Call.pairs",
        '("dst", [p[1] for p in pairs])',
        '("dst", [p[0] for p in pairs])',
        "arguments permute",
        WRONG,
    ),
    Mutant(
        "core/arguments.py",
        "Call.replicated",
        'value not in ("partial", "replicate")',
        "not isinstance(value, str)",
        "arguments replicate",
        WRONG,
    ),
    Mutant("core/arguments.py", "Call.op", "x.is_complex():\n            remedy", "False:\n            remedy", "arguments", WRONG),
    Mutant("core/expect.py", "_index", "if isinstance(value, bool):", "if value is None:", "arguments", WRONG),
    Mutant("core/expect.py", "flag", "value is not True and value is not False", "value not in (True, False)", "arguments", WRONG),
    Mutant("core/arguments.py", "Call.tensor", 'c.__name__ == "DTensor"', 'c.__name__ == "DTensors"', "arguments", "tests/test_bad_input.py::test_a_dtensor"),
    Mutant("core/arguments.py", "Call.tensor", 'device == "meta" or', "", "arguments", "tests/test_bad_input.py::test_wrong_x"),
    # check mode: what the ranks compare, and that all of them raise
    # joint_backward
    Mutant("core/joint.py", "joint_backward.__enter__", "recording() or _Chain()", "_Chain()", "joint_backward", f"{JOINT}test_gradients_are_those_of_truth"),
    Mutant("core/joint.py", "joint_backward.__exit__", "of_thread.chain, of_thread.backward = self._outer", "of_thread.chain, of_thread.backward = None, -1", "joint_backward", f"{JOINT}test_gradients_are_those_of_truth"),
    Mutant("core/joint.py", "recording", "if of_thread.backward == backward_at_work() else None", "", "joint_backward", f"{JOINT}test_second_order"),
    # async_op
    Mutant("core/moves.py", "_begin", "if not later or f.reads_at_once:", "if True:", "async_op inputs", f"{PENDING}test_memory_may_change_once_a_collective_has_been_started"),
    Mutant("core/pending.py", "Pending.__del__", 'if getattr(self, "_must_wait", False):', "if self._wait is None:", "async_op", f"{PENDING}test_a_forgotten_wait_is_reported"),
    # the error of a result that was given up is not that of the next call
    Mutant("core/moves.py", "_begin", "pass  # not this call's error", "raise  # not this call's error", "async_op errors", PENDING),
    # errors
    Mutant("core/errors.py", "Origin.of_next_order", "following.order += 1", "pass", "errors second_order", "tests/test_failures.py::test_a_rank_that_lacks_a_backward"),
    Mutant("core/errors.py", "_is_inside", "and not file.startswith(_INSTALLED)", "", "errors", "tests/core/test_errors.py::test_files"),
    Mutant("core/errors.py", "_is_ours", 'module.partition(".")[0] in', "module in", "errors", "tests/core/test_errors.py::test_code_that_names_no_file_of_its_module"),
    Mutant("core/arguments.py", "Call.error", "return ValueError(message", "return TypeError(message", "errors arguments", WRONG),
    # groups
    Mutant("core/groups.py", "_refuse_lonely_launch", "int(value) > 1:", "int(value) > 2:", "one_group", "tests/core/test_groups.py::test_launched_but_not_connected"),
    Mutant("core/groups.py", "set_default_group.__exit__", "_set_default(self._before)", "_set_default(None)", "one_group", "tests/core/test_groups.py"),
    Mutant("core/groups.py", "set_default_group.__init__", 'resolve(group, "set_default_group")', "pass", "one_group", "tests/core/test_groups.py::test_default_group"),
    Mutant("core/groups.py", "_set_default", "me.default_group, before = group, me.default_group", "_default, before = group, _default", "one_group", "tests/core/test_groups.py::test_default_group"),
    # the rules
    Mutant("core/rules.py", "_Apply.backward", "ctx.f.adjoint", "ctx.f", "law", f"{TABLE} broadcast-2"),
    Mutant("core/rules.py", "_dense", "gy.to_dense()", "gy.coalesce().values()", "law", "tests/engines -k sparse"),
    Mutant("core/rules.py", "_Wait.backward", "_dense(gy), ctx.f.adjoint", "_dense(gy), ctx.f", "law async_op", ALL_PENDING),
    Mutant("core/rules.py", "_Apply.backward", "_dense(gy)", "_dense(gy).detach()", "second_order", f"{TABLE} all_gather-2"),
    Mutant("core/rules.py", "_Wait.backward", "_dense(gy)", "_dense(gy).detach()", "second_order async_op", ALL_PENDING),
    Mutant("core/rules.py", "_Wait.backward", "adjoints[backward_at_work()] = adjoint", "adjoints[0] = adjoint", "second_order async_op", ALL_PENDING),
    Mutant("core/rules.py", "_Apply.jvp", "record(_Apply, tx, ctx.f, None)", "record(_Apply, tx, ctx.f.adjoint, None)", "forward_mode", f"{TABLE} broadcast-2"),
    Mutant("core/rules.py", "_Apply.jvp", "record(_Apply, tx, ctx.f, None)", "record(_Apply, tx.detach(), ctx.f, None)", "forward_mode transforms", "tests/test_nests.py"),
    Mutant("core/rules.py", "_Apply.jvp", "record(_Apply, tx, ctx.f, None)", "tx", "forward_mode", f"{TABLE} all_reduce-2"),
    Mutant("core/rules.py", "_Wait.jvp", "tangents.popleft()", "tangents.pop()", "forward_mode async_op", ALL_PENDING),
    Mutant("core/rules.py", "_Apply.vmap", "x.movedim(in_dims[0], -1)", "x.movedim(0, -1)", "vmap", f"{TABLE} all_gather-2"),
    Mutant("core/rules.py", "_Start.vmap", "x.movedim(in_dims[0], -1)", "x.movedim(0, -1)", "vmap async_op", f"{TABLE} all_reduce-2"),
    Mutant("core/rules.py", "_of_backward", "if origin.elsewhere:", "if False:", "second_order errors", "tests/test_hooks_and_threads.py tests/test_failures.py"),
    Mutant("core/torch_private/autograd.py", "save_in_checkpoint", "is not None:", "is None:", "transforms joint_backward", "tests/core/test_joint.py"),
    # moves
    Mutant("core/moves.py", "_observed", "        with unobserved():\n", "        if True:\n", "transforms", "tests/core/test_modes.py"),
    Mutant("core/moves.py", "InFlight.__del__", "self._f.engine.abandoned.append(self._wait)", "pass", "transforms async_op", ALL_PENDING),
    Mutant("core/moves.py", "InFlight._start", "wait if x.is_cpu else _wait_across_streams(wait, x.device)", "wait", "streams async_op", "-p tests.late_device.on tests/late_device/test_synchronization.py"),
    # compiled graphs
    Mutant("core/compiled.py", "_Apply.backward", "ctx.f.adjoint", "ctx.f", "compile", ALL_COMPILED),
    Mutant("core/compiled.py", "_read", "tuple(sizes[start : start + length])", "tuple(sorted(sizes[start : start + length]))", "compile sizes", ALL_COMPILED),
    Mutant("core/compiled.py", "_checked", "if is_differentiating():", "if False:", "compile forward_mode", ALL_COMPILED),
    Mutant("core/compiled.py", "_Wait.backward", "ctx.f.adjoint", "ctx.f", "compile async_op", ALL_COMPILED),
    # check mode: one tuple
    Mutant("core/check_mode.py", "compare_moves", "arguments, x.dtype, f.common_shape", "arguments, f.common_shape", "check_mode", DISAGREEMENTS),
    Mutant("core/check_mode.py", "compare_moves", "x.dtype, f.common_shape(x.shape), later", "x.dtype, later", "check_mode", DISAGREEMENTS),
    Mutant("core/check_mode.py", "compare_moves", "f.common_shape(x.shape), later\n", "f.common_shape(x.shape)\n", "check_mode async_op", DISAGREEMENTS),
    Mutant("core/check_mode.py", "compare_moves", "f.name, f.detail, arguments", "f.name, arguments", "check_mode op", DISAGREEMENTS),
    Mutant("core/check_mode.py", "compare_moves", "facts = number, order, type(f)", "facts = order, type(f)", "check_mode", DISAGREEMENTS),
    Mutant("core/check_mode.py", "compare_moves", "if f.shared[0]:", "if f.shared[0] and origin is None:", "check_mode replicate", DISAGREEMENTS),
    Mutant("core/check_mode.py", "_compare_blocks", "row[s] != other[n + r] if same", "False if same", "check_mode all_to_all", DISAGREEMENTS),
    Mutant("core/check_mode.py", "same_everywhere", "torch.equal(xs[r], xs[0])", "True", "check_mode replicate", "tests/test_dtypes.py::test_replicated_tensors_of_every_dtype_are_compared"),
    Mutant("core/check_mode.py", "check_mode.__exit__", "state.on = self._before", "pass", "check_mode", DISAGREEMENTS),
    Mutant("core/check_mode.py", "_compare_end", "if not differs and not engine.ended", "if not engine.ended", "check_mode", DISAGREEMENTS),
    Mutant("core/check_mode.py", "check_mode.__exit__", "_compare_end(used, error)", "_compare_end(used, error) if error is None else None", "check_mode", DISAGREEMENTS),
    Mutant("core/control.py", "Control.agree", "!= {mine}:", "< {mine}:", "check_mode", DISAGREEMENTS),
    # joint_backward
    Mutant("core/joint.py", "record", "and torch.is_grad_enabled()", "and x.requires_grad", "joint_backward", "tests/core/test_joint.py"),
    Mutant("core/pending.py", "Pending.wait", "            self._wait = None\n", "            pass\n", "async_op", ALL_PENDING),
]  # fmt: skip
