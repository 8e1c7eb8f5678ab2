"""Which test shows which of the reported cases of messages, tenants, streams and limits; each test must exist.

The numbers are those of the list of reported cases. The tests lie with what they test; here they are found.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CASES: dict[int, tuple[str, ...]] = {
    # messages
    59: (
        "app/test_upstream_relay.py::test_unknown_fields_and_reasoning_options_reach_the_upstream",
        "app/test_upstream_body.py::test_everything_unknown_keeps_its_bytes",
        "app/test_reported_cases_http.py::test_unknown_fields_are_named_at_every_depth_that_is_ours_and_kept_at_every_other",
        "integration/test_vllm.py::test_fields_that_only_the_server_knows_reach_it",
    ),
    61: (
        "app/test_upstream_relay.py::test_unknown_fields_and_reasoning_options_reach_the_upstream",
        "app/test_reported_cases_http.py::test_switches_of_the_template_reach_the_engine",
        "app/test_completion_request.py::test_the_reasoning_effort_is_a_variable_of_the_template",
    ),
    64: (
        "app/test_reported_cases_http.py::test_turns_with_refusal_null_content_or_only_calls_are_accepted_and_passed_on",
        "app/test_upstream_relay.py::test_a_conversation_with_calls_refusals_images_and_functions_passes_unchanged",
    ),
    65: ("reducer/test_reported_cases.py::test_row_of_a_long_price_table_comes_with_the_header",),
    66: (
        "app/test_upstream_relay.py::test_streamed_arguments_arrive_as_the_same_deltas",
        "app/test_other_shapes.py::test_streamed_tool_use_has_the_same_input",
        "app/test_tool_calls.py::test_a_stream_tells_the_same_calls",
        "engine/test_tool_parsers.py::test_the_cuts_between_pieces_change_nothing",
    ),
    # tenants
    75: (
        "engine/test_reported_cases.py::test_75_a_tenant_hits_its_own_prefix_and_misses_that_of_another",
        "engine/test_reported_cases.py::test_75_nor_does_a_tenant_wait_for_the_prefix_that_another_is_computing",
        "app/test_chat_api.py::test_cached_tokens_are_reported_to_the_own_tenant_only",
        "integration/test_vllm.py::test_the_cache_is_shared_within_a_tenant_and_with_nobody_else",
    ),
    76: (
        "engine/test_reported_cases.py::test_76_the_salt_alone_decides_so_a_token_that_looks_like_one_does_not",
        "app/test_chat_api.py::test_the_cache_salt_comes_from_the_tenant_never_from_the_body",
        "app/test_upstream_relay.py::test_tenants_have_salts_of_their_own_whatever_they_send",
        "integration/test_vllm.py::test_a_callers_own_salt_opens_no_other_cache",
    ),
    77: (
        "engine/test_reported_cases.py::test_77_a_tenant_that_sends_twice_hits",
        "integration/test_vllm.py::test_the_cache_is_shared_within_a_tenant_and_with_nobody_else",
    ),
    79: (
        "engine/test_reported_cases.py::test_79_an_empty_salt_is_refused_and_a_blank_one_is_private",
        "app/test_settings.py::test_tenant_ids_that_name_nobody_or_are_no_plain_word_are_refused",
        "app/test_directory.py::test_a_tenant_without_a_name_gets_no_salt",
    ),
    81: (
        "engine/test_reported_cases.py::test_81_a_public_prefix_is_computed_once_for_all_tenants_and_nothing_else_is_shared",
        "engine/test_reported_cases.py::test_81_a_prompt_that_only_begins_like_a_public_prefix_shares_only_that_part",
    ),
    82: (
        "app/test_compact_api.py::test_documents_of_other_groups_are_only_counted",
        "app/test_compact_api.py::test_a_tenant_may_deny_unlabelled_documents",
        "reducer/test_reported_cases.py::test_unlabelled_passage_is_denied_where_the_tenant_says_so",
        "app/test_document_access.py::test_a_misspelt_rule_is_refused_and_never_read_as_open",
    ),
    83: (
        "engine/test_reported_cases.py::test_83_revoked_access_leaves_nothing_to_hit_for_another_principal",
        "app/test_reported_cases_http.py::test_readers_of_a_text_are_checked_on_every_turn_whatever_cleaning_did_to_it",
        "app/test_receipts.py::test_a_key_with_fewer_groups_does_not_read_what_a_key_with_more_has_seen",
    ),
    85: (
        "engine/test_reported_cases.py::test_85_every_setting_that_changes_the_answer_changes_every_block",
        "engine/test_reported_cases.py::test_85_another_system_prompt_is_a_miss_for_all_that_follows",
    ),
    87: ("reducer/test_history.py::test_orders_in_pasted_text_stay_quotations",),
    # streams, leaving, errors
    88: (
        "app/test_upstream_relay.py::test_characters_survive_every_split",
        "engine/test_detokenizer.py::test_no_step_returns_part_of_a_character",
    ),
    89: (
        "app/test_openai_client.py::test_a_client_that_leaves_stops_the_engine_within_a_second",
        "app/test_openai_client.py::test_a_client_that_leaves_before_the_first_token_stops_the_engine",
        "app/test_upstream_relay.py::test_a_client_that_leaves_is_gone_at_the_upstream_within_a_second",
        "engine/test_scheduler.py::test_abort_in_any_state_gives_everything_back",
        "integration/test_gateway_real.py::test_a_client_that_leaves_frees_its_sequence",
        "integration/test_gateway_real.py::test_a_client_that_leaves_during_the_prefill_frees_its_sequence",
        "integration/test_gateway_real.py::test_a_client_that_leaves_the_queue_is_never_computed",
        "integration/test_vllm.py::test_a_client_that_leaves_frees_the_server_within_a_second",
    ),
    91: (
        "app/test_chat_api.py::test_a_failure_in_a_stream_is_an_error_frame_without_finish_reason_or_done",
        "app/test_upstream_relay.py::test_a_stream_that_breaks_off_ends_with_an_error_and_nothing_else",
        "app/test_client_errors.py::test_an_engine_that_fails_in_a_stream",
        "app/test_client_errors.py::test_an_upstream_that_fails_in_a_stream",
        "integration/test_vllm.py::test_a_server_that_dies_breaks_the_stream_and_is_then_unavailable",
    ),
    92: (
        "app/test_chat_api.py::test_a_client_that_did_not_ask_sees_no_usage_in_a_stream",
        "app/test_upstream_relay.py::test_a_client_that_did_not_ask_sees_no_usage",
        "app/test_upstream_relay.py::test_a_client_that_asked_gets_usage_once_in_a_last_chunk_without_choices",
        "integration/test_vllm.py::test_a_stream_is_the_same_answer_and_has_usage_only_when_asked",
    ),
    # usage, limits, metrics, configuration
    94: (
        "app/test_receipts.py::test_saved_tokens_are_never_negative",
        "app/test_openai_client.py::test_documents_and_overrides_go_in_the_extra_body",
        "integration/test_vllm.py::test_the_gateways_count_is_the_servers",
    ),
    95: (
        "app/test_chat_api.py::test_cached_tokens_are_reported_to_the_own_tenant_only",
        "app/test_openai_client.py::test_chat",
        "app/test_upstream_relay.py::test_chat",
    ),
    97: (
        "app/test_observability.py::test_no_series_grows_with_tenants_requests_or_documents",
        "app/test_series.py::test_series_do_not_grow_with_tenants_models_paths_methods_or_keys",
        "app/test_series.py::test_series_do_not_grow_with_what_an_upstream_makes_up",
    ),
    98: (
        "app/test_config_reload.py::test_a_bad_file_keeps_the_last_good_one_and_is_reported",
        "app/test_config_reload.py::test_a_request_that_runs_keeps_the_snapshot_it_began_with",
        "app/test_config_reload.py::test_a_missing_file_keeps_the_last_good_one",
    ),
    108: (
        "app/test_counters.py::test_a_stream_over_the_limit_is_charged_whole_and_the_next_request_refused_once",
        "app/test_generation.py::test_reading_to_the_end_charges_prompt_and_output",
    ),
    109: (
        "app/test_stage_failures.py::test_an_open_stage_is_left_out_and_answer_receipt_and_metrics_say_so",
        "app/test_stage_failures.py::test_a_closed_stage_is_503_and_names_itself_and_no_text",
        "reducer/test_pipeline.py::test_failing_encoder_degrades_and_still_answers",
    ),
}


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file below ``tests``."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


@pytest.mark.parametrize("number", CASES)
def test_every_case_has_its_tests(number: int) -> None:
    for place in CASES[number]:
        file, _, name = place.partition("::")
        assert name in names_in(file), f"case {number}: {place} does not exist"
