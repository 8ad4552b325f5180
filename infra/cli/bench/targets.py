"""What each benchmark aims at."""

# Benchmarks with one figure to a name: figure → (at least, at most); what is measured beside peers has targets of its own.
TARGETS: dict[str, dict[str, tuple[float, float]]] = {
    "audit": {"audit_peak_mb": (0.0, 1_000.0), "trace_peak_mb": (0.0, 1_000.0)},
    "card": {"pass_s": (0.0, 1.0)},
    "delta": {"full_over_delta": (90.0, float("inf")), "bit_exact": (1.0, 1.0)},
    "draw": {
        f"{groups}_{draw}_ms_p50": (0.0, 10.0)
        for groups in ("groups_of_16", "alone")
        for draw in ("priority", "spread")
    },
    "episodes": {"failed": (0.0, 0.0), "not_their_own": (0.0, 0.0)},
    "fan-out": {
        "get_over_one_connection": (8.0, float("inf")),
        "put_over_one_connection": (8.0, float("inf")),
        "cached_version_bytes_per_host": (0.0, 1.05),
    },
    "reprocess": {"verify_different": (0.0, 0.0), "collect_different": (0.0, 0.0)},
    "feedback": {"joins_per_s": (2_000.0, float("inf")), "rebuild_s": (0.0, 30.0)},
    "gateway": {
        "overhead_ms_p50": (float("-inf"), 3.0),
        "overhead_ms_p99": (float("-inf"), 15.0),
        "answers_per_s": (500.0, float("inf")),
    },
    "held": {
        f"{name}_held_ms": (0.0, 50.0) for name in ("prompt", "control_tokens", "redact_letters", "redact_digits")
    },
    "lora": {"share": (0.0, 0.01)},
    "reload": {
        "rebuild_pause_ms_p50": (0.0, 60.0),
        "keep_pause_ms_p50": (0.0, 30.0),
        **{
            f"{mode}_{figure}": target
            for mode in ("rebuild", "keep")
            for figure, target in (
                ("pause_ms_p95", (0.0, 200.0)),
                ("requests_failed", (0.0, 0.0)),
                ("front_mb_per_version", (float("-inf"), 0.1)),
                ("core_mb_per_version", (float("-inf"), 0.1)),
            )
        },
    },
    "offpolicy": {
        "dppo_lag_8_points_lost": (float("-inf"), 3.0),
        "decoupled_lag_8_points_lost": (float("-inf"), 3.0),
    },
    "mix": {
        **{f"sft_seed_{seed}_best": (0.0, 10.0) for seed in range(3)},
        **{f"grpo_seed_{seed}_best": (0.0, 0.0) for seed in range(3)},
        **{f"mix_seed_{seed}_last": (80.0, float("inf")) for seed in range(3)},
    },
    "life": {
        "steps": (10.0, 10.0),
        "steps_in_order": (1.0, 1.0),
        "each_experience_trained_once": (1.0, 1.0),
        "resumed_with_equal_hash": (1.0, 1.0),
        "served_version": (5.0, 5.0),
    },
    "memory": {"step_said_over_held": (0.9, 1.1), "with_versions_said_over_held": (0.9, 1.1)},
    "outage": {
        "p99_away_over_before": (0.0, 1.1),
        "p99_back_over_before": (0.0, 1.1),
        "failed": (0.0, 0.0),
        "lost": (0.0, 0.0),
        "stored_twice": (0.0, 0.0),
    },
    "state": {
        **{f"ranks_{num_ranks}_equal_hash": (1.0, 1.0) for num_ranks in (1, 2, 3)},
        "save_peak_gib_above_shards": (float("-inf"), 1.0),
        **{f"ranks_{num_ranks}_load_peak_gib": (float("-inf"), 1.0) for num_ranks in (1, 2, 3)},
        "publish_peak_gib_above_parts": (float("-inf"), 1.0),
    },
    "weights": {
        **{f"trainer_v{version}_cpu_s_per_gb": (0.0, 1.0) for version in (0, 1, 5, 20, 50)},
        **{f"explorer_v{version}_cpu_s_per_gb": (0.0, 1.5) for version in (1, 5, 20, 50)},
        **{f"explorer_behind_{behind}_cpu_s_per_gb": (0.0, 1.5) for behind in (5, 15, 30)},
        "cached_anchor_cpu_s_per_gb": (0.0, 1.5),
        "trainer_wall_over_cpu": (0.0, 0.6),
        "explorer_wall_over_cpu": (0.0, 0.6),
        "trainer_stall_ms": (0.0, 50.0),
        "explorer_stall_ms": (0.0, 50.0),
        "engine_peak_over_weights": (0.0, 2.2),
        "second_engine_peak_over_weights": (0.0, 1.2),
    },
    "takeover": {"taken_over_s": (0.0, 60.0), "taken_over_peak_mb": (0.0, 2_500.0)},
    "stream": {"events_per_s": (20_000.0, float("inf")), "gap_ms_p99": (0.0, 100.0)},
    "turn": {"explorer_held_ms": (0.0, 5.0), "gateway_held_ms": (0.0, 5.0)},
    "console": {
        "first_page_s": (0.0, 1.0),
        "search_ms_p95": (0.0, 300.0),
        "memory_mb": (0.0, 300.0),
        "old_log_first_page_s": (0.0, 1.0),
        "old_log_memory_mb": (0.0, 300.0),
    },
    # Within two standard errors of nothing, and these small enough to say so.
    "console-load": {
        "slower_in_errors": (float("-inf"), 2.0),
        "slower_share_error": (0.0, 0.03),
        "pages_failed": (0.0, 0.0),
    },
    "trace": {"after_1000_more_s": (0.0, 1.0), "answer_ms_p99": (0.0, 1000.0), "policy_ms": (0.0, 1000.0)},
    "overlap": {
        **{f"sigma_0.5_waves_{waves}_busier": (0.95, float("inf")) for waves in (1, 4)},
        **{f"sigma_{sigma}_waves_{waves}_faster": (1.8, float("inf")) for sigma in ("0.5", "1") for waves in (1, 4)},
    },
    "start": {f"demo_{kind}_wall_s": (0.0, 40.0) for kind in ("cold", "warm")},
    "sandbox": {"overhead_ms_p50": (0.0, 60.0), "orphans": (0.0, 0.0), "zombies": (0.0, 0.0)},
}
