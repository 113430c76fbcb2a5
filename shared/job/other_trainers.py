"""What other trainers call RLBoost's job keys: for the error about an unknown key, and for two pages of the docs.

Names are those of TRL 1.16 (`GRPOConfig`, `DPOConfig`, and arguments of `GRPOTrainer`), verl 0.9 (`ppo_trainer.yaml`;
`actor.`, `rollout.` and `model.` are below `actor_rollout_ref`), OpenRLHF 0.11 (`train_ppo_ray`) and prime-rl (2026;
`model.`, `optim.`, `loss.` and `scheduler.` are the trainer's, the others the orchestrator's).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple


class Names(NamedTuple):
    """Names of one key, each in code marks where it is a name; empty where there is no such setting."""

    trl: str = ""
    verl: str = ""
    openrlhf: str = ""
    prime_rl: str = ""


NAMES: Mapping[str, Names] = {
    "model": Names("`model`", "`model.path`", "`actor.model_name_or_path`", "`model.name`"),
    "name": Names("`run_name`", "`trainer.experiment_name`", "`logger.wandb.run_name`", "`wandb.name`"),
    "steps": Names("`max_steps`", "`trainer.total_training_steps`", "", "`max_steps`"),
    "data.train": Names("`train_dataset`", "`data.train_files`", "`data.prompt_dataset`", "`env`"),
    "data.eval": Names("`eval_dataset`", "`data.val_files`", "`eval.dataset`", "`eval.env`"),
    "data.prompt_key": Names("", "`data.prompt_key`", "`data.input_key`"),
    "data.system_prompt": Names("", "", "", "`env.args.system_prompt`"),
    "data.chat_template_kwargs": Names("`chat_template_kwargs`", "`data.apply_chat_template_kwargs`"),
    "data.train_split": Names("", "", "`data.prompt_split`"),
    "data.eval_split": Names("", "", "`eval.split`"),
    "data.max_prompt_tokens": Names("", "`data.max_prompt_length`"),
    "data.max_image_pixels": Names("`max_pixels` of the processor", "`max_pixels` of an image"),
    "data.prompts_per_step": Names(
        "`generation_batch_size` / `num_generations`",
        "`data.train_batch_size`",
        "`rollout.batch_size`",
        "`batch_size` / `rollouts_per_example`",
    ),
    "data.curriculum.skip_solved_above": Names("", "", "", "`buffer.easy_threshold`"),
    "data.curriculum.skip_failed_below": Names("", "", "", "`buffer.hard_threshold`"),
    "reward.function": Names("`reward_funcs`", "`reward.custom_reward_function.path`", "`reward.remote_url`"),
    "reward.url": Names("", "", "`reward.remote_url`"),
    "reward.model": Names("`reward_funcs`"),
    "reward.workers": Names("", "`reward.num_workers`"),
    "reward.functions.weight": Names("`reward_weights`"),
    "environment.function": Names(
        "`environment_factory`", "`rollout.agent.agent_loop_config_path`", "`train.agent_func_path`", "`env.id`"
    ),
    "environment.arguments": Names("", "", "", "`env.args`"),
    "environment.max_turns": Names(
        "`max_tool_calling_iterations` (turns after the first)", "`rollout.multi_turn.max_assistant_turns`"
    ),
    "algorithm.name": Names("", "`algorithm.adv_estimator`", "`algo.advantage.estimator`", "`loss.type`"),
    "algorithm.group_size": Names(
        "`num_generations`", "`rollout.n`", "`rollout.n_samples_per_prompt`", "`rollouts_per_example`"
    ),
    "algorithm.updates_per_step": Names(
        "`steps_per_generation` / `gradient_accumulation_steps`",
        "`data.train_batch_size` / `actor.ppo_mini_batch_size`",
        "`rollout.batch_size` x `rollout.n_samples_per_prompt` / `train.batch_size`",
    ),
    "algorithm.epochs": Names("`num_iterations`", "`actor.ppo_epochs`", "`train.max_epochs`"),
    "algorithm.advantage": Names(
        "`scale_rewards` (group is group_std, none group_mean)",
        "`algorithm.norm_adv_by_std_in_grpo`",
        "`algo.advantage.no_std_norm`",
        "`advantage.type`",
    ),
    "algorithm.equal_groups": Names(
        "",
        "`algorithm.filter_groups.enable`",
        "`algo.dynamic_filtering_enable`",
        "`buffer.online_difficulty_filtering`",
    ),
    "algorithm.resample": Names("", "`algorithm.filter_groups.max_num_gen_batches`"),
    "algorithm.loss": Names("", "`actor.policy_loss.loss_mode`", "", "`loss.import_path`"),
    "algorithm.ratio": Names(
        "`importance_sampling_level`", "`actor.policy_loss.loss_mode`", "`actor.policy_loss_type`"
    ),
    "algorithm.clip_low": Names(
        "`epsilon` (both sides, unless epsilon_high is set)",
        "`actor.clip_ratio_low`",
        "`actor.eps_clip_low_high`",
        "`loss.ipo_mask_low`",
    ),
    "algorithm.clip_high": Names(
        "`epsilon_high` (1 larger for CISPO: the bound itself)",
        "`actor.clip_ratio_high`",
        "`actor.eps_clip_low_high`",
        "`loss.ipo_mask_high`",
    ),
    "algorithm.aggregation": Names(
        "`loss_type` (dapo is token_mean, grpo sequence_mean, dr_grpo constant)",
        "`actor.loss_agg_mode` (token-mean is token_mean, seq-mean-token-mean sequence_mean, seq-mean-token-sum "
        "sequence_sum)",
        "`actor.loss_agg_mode`",
    ),
    "algorithm.old_logprobs": Names("", "`algorithm.rollout_correction.bypass_mode`"),
    "algorithm.tis_cap": Names(
        "`vllm_importance_sampling_clip_max`",
        "`algorithm.rollout_correction.rollout_is_threshold`",
        "`algo.advantage.is_correction_threshold`",
    ),
    "algorithm.importance": Names(
        "`vllm_importance_sampling_mode`",
        "`algorithm.rollout_correction.rollout_rs`",
        "`algo.advantage.is_correction_mode`",
    ),
    "algorithm.rollout_is": Names("", "`algorithm.rollout_correction.rollout_is`"),
    "algorithm.rollout_rs.level": Names("", "`algorithm.rollout_correction.rollout_rs`"),
    "algorithm.rollout_rs.threshold": Names("", "`algorithm.rollout_correction.rollout_rs_threshold`"),
    "algorithm.rollout_rs.threshold_lower": Names("", "`algorithm.rollout_correction.rollout_rs_threshold_lower`"),
    "algorithm.rollout_rs.token_veto": Names("", "`algorithm.rollout_correction.rollout_token_veto_threshold`"),
    "algorithm.kl_coef": Names("`beta`", "`actor.kl_loss_coef`", "`algo.kl.init_coef`", "`loss.kl_tau`"),
    "algorithm.kl_estimator": Names(
        "", "`actor.kl_loss_type` (kl is k1, mse k2, low_var_kl k3)", "`algo.kl.estimator`"
    ),
    "algorithm.entropy_coef": Names("`entropy_coef`", "`actor.entropy_coeff`"),
    "algorithm.mask_truncated": Names("`mask_truncated_completions`"),
    "algorithm.overlong_penalty": Names(
        "", "`reward.reward_kwargs.overlong_buffer_cfg.penalty_factor`", "`reward.overlong_penalty_factor`"
    ),
    "algorithm.overlong_fraction": Names(
        "",
        "`reward.reward_kwargs.overlong_buffer_cfg.len` / `data.max_response_length`",
        "`reward.overlong_buffer_len` / `rollout.max_new_tokens`",
    ),
    "algorithm.critic.lr": Names("", "`critic.optim.lr`", "`critic.adam.lr`"),
    "algorithm.critic.betas": Names("", "`critic.optim.betas`", "`critic.adam.betas`"),
    "algorithm.critic.weight_decay": Names("", "`critic.optim.weight_decay`", "`critic.adam.weight_decay`"),
    "algorithm.critic.grad_clip": Names("", "`critic.grad_clip`"),
    "algorithm.critic.gamma": Names("", "`algorithm.gamma`", "`algo.advantage.gamma`"),
    "algorithm.critic.gae_lambda": Names("", "`algorithm.lam`", "`algo.advantage.lambd`"),
    "algorithm.critic.value_clip": Names("", "`critic.cliprange_value`", "`critic.value_clip`"),
    "algorithm.preference.variant": Names("`loss_type`"),
    "algorithm.teacher.model": Names("`teacher_model_name_or_path`"),
    "algorithm.preference.beta": Names("`beta`"),
    "algorithm.preference.label_smoothing": Names("`label_smoothing`"),
    "algorithm.center_rewards_coefficient": Names("`center_rewards_coefficient`"),
    "sampling.temperature": Names(
        "`temperature`", "`rollout.temperature`", "`rollout.temperature`", "`sampling.temperature`"
    ),
    "sampling.top_p": Names("`top_p`", "`rollout.top_p`", "`rollout.top_p`"),
    "sampling.top_k": Names("`top_k`", "`rollout.top_k` (-1 for all)", "", "`sampling.top_k`"),
    "sampling.min_p": Names("`min_p`", "", "", "`sampling.min_p`"),
    "sampling.max_tokens": Names(
        "`max_completion_length`", "`data.max_response_length`", "`rollout.max_new_tokens`", "`sampling.max_tokens`"
    ),
    "sampling.min_tokens": Names("`generation_kwargs.min_tokens`", "", "", "`sampling.min_tokens`"),
    "sampling.stop": Names("`generation_kwargs.stop`", "`rollout.stop`", "", "`sampling.stop`"),
    "optimizer.name": Names("`optim`", "`actor.optim.optimizer`", "`actor.optim`", "`optim.type`"),
    "optimizer.lr": Names("`learning_rate`", "`actor.optim.lr`", "`actor.adam.lr`", "`optim.lr`"),
    "optimizer.betas": Names(
        "`adam_beta1`, `adam_beta2`", "`actor.optim.betas`", "`actor.adam.betas`", "`optim.betas1`, `optim.betas2`"
    ),
    "optimizer.weight_decay": Names(
        "`weight_decay`", "`actor.optim.weight_decay`", "`actor.adam.weight_decay`", "`optim.weight_decay`"
    ),
    "optimizer.warmup_steps": Names("`warmup_steps`", "`actor.optim.lr_warmup_steps`", "", "`scheduler.warmup_steps`"),
    "optimizer.decay": Names(
        "`lr_scheduler_kwargs.min_lr_rate` (what is left of lr: 1 - decay)",
        "`actor.optim.min_lr_ratio` (what is left of lr: 1 - decay)",
    ),
    "optimizer.schedule": Names(
        "`lr_scheduler_type`", "`actor.optim.lr_scheduler_type`", "`actor.lr_scheduler`", "`scheduler.type`"
    ),
    "optimizer.grad_clip": Names("`max_grad_norm`", "`actor.grad_clip`", "", "`optim.max_norm`"),
    "lora.rank": Names("`peft_config.r`", "`model.lora_rank`", "`ds.lora.rank`", "`model.lora.rank`"),
    "lora.alpha": Names("`peft_config.lora_alpha`", "`model.lora_alpha`", "`ds.lora.alpha`", "`model.lora.alpha`"),
    "lora.dropout": Names(
        "`peft_config.lora_dropout`", "`model.lora.dropout`", "`ds.lora.dropout`", "`model.lora.dropout`"
    ),
    "lora.targets": Names(
        "`peft_config.target_modules`",
        "`model.target_modules`",
        "`ds.lora.target_modules`",
        "`model.lora.target_modules`",
    ),
    "trainer.backend": Names("", "`actor.strategy`"),
    "trainer.dtype": Names("`bf16`", "`actor.fsdp_config.dtype`", "`ds.param_dtype`"),
    "trainer.checkpoint_every": Names("`save_steps`", "`trainer.save_freq`", "`ckpt.save_steps`", "`ckpt.interval`"),
    "trainer.checkpoints": Names("`output_dir`", "`trainer.default_local_dir`", "`ckpt.path`", "`output_dir`"),
    "trainer.resume": Names(
        "`resume_from_checkpoint`", "`trainer.resume_mode`", "`ckpt.load_enable`", "`ckpt.resume_step`"
    ),
    "trainer.micro_batch_tokens": Names(
        "`per_device_train_batch_size` (in completions)",
        "`actor.ppo_max_token_len_per_gpu`",
        "`train.max_tokens_per_gpu`",
        "`seq_len`",
    ),
    "trainer.activation_checkpointing": Names(
        "`gradient_checkpointing`",
        "`model.enable_gradient_checkpointing`",
        "`actor.gradient_checkpointing_enable`",
        "`model.ac`",
    ),
    "trainer.freeze_vision_tower": Names("", "`actor.freeze_vision_tower`"),
    "trainer.compile": Names("`torch_compile`", "`actor.fsdp_config.use_torch_compile`", "", "`model.compile`"),
    "trainer.router_aux_loss_coef": Names("`model_init_kwargs.router_aux_loss_coef`"),
    "trainer.router_replay": Names("", "`actor.megatron.router_replay.mode`"),
    "trainer.seed": Names("`seed`", "`data.seed`", "`train.seed`", "`seed`"),
    "trainer.deterministic": Names("`full_determinism`"),
    "trainer.offload": Names(
        "", "`actor.fsdp_config.optimizer_offload`", "`ds.adam_offload`", "`model.optim_cpu_offload`"
    ),
    "trainer.tensor_parallel": Names(
        "", "`actor.megatron.tensor_model_parallel_size`", "`ds.tensor_parallel_size`", "`model.tp`"
    ),
    "trainer.pipeline_parallel": Names("", "`actor.megatron.pipeline_model_parallel_size`"),
    "trainer.data_parallel": Names(
        "`accelerate launch --num_processes`", "`trainer.n_gpus_per_node`", "`actor.num_gpus_per_node`"
    ),
    "trainer.context_parallel": Names(
        "",
        "`actor.ulysses_sequence_parallel_size`",
        "",
        "`model.cp`",
    ),
    "trainer.fsdp_size": Names("", "`actor.fsdp_config.fsdp_size`"),
    "trainer.expert_parallel": Names("", "`actor.megatron.expert_model_parallel_size`", "", "`model.ep`"),
    "trainer.nodes": Names("`accelerate launch --num_machines`", "`trainer.nnodes`", "`actor.num_nodes`"),
    "elastic.max_staleness": Names(
        "", "`trainer.v1.sampler.max_off_policy_threshold`", "`train.async_queue_size`", "`max_async_level`"
    ),
    "elastic.in_flight": Names("", "", "`train.partial_rollout_enable`"),
    "eval.every": Names("`eval_steps`", "`trainer.test_freq`", "`eval.steps`", "`eval.interval`"),
    "eval.sets": Names("`eval_dataset` (a dict)", "`data.val_files` (a list)", "", "`eval.env` (a list)"),
    "eval.sets.sampling": Names("", "`rollout.val_kwargs`", "", "`eval.sampling`"),
    "eval.samples": Names(
        "`num_generations_eval` (per prompt)",
        "`rollout.val_kwargs.n` (per prompt)",
        "`eval.n_samples_per_prompt` (per prompt)",
        "`eval.rollouts_per_example` (per prompt)",
    ),
    "log.wandb": Names("`report_to`", "`trainer.logger`", "`logger.wandb.key`", "`wandb`"),
    "log.wandb.project": Names("`project`", "`trainer.project_name`", "`logger.wandb.project`", "`wandb.project`"),
    "log.wandb.entity": Names("", "", "`logger.wandb.org`"),
    "log.wandb.group": Names("", "", "`logger.wandb.group`"),
    "log.mlflow": Names("`report_to`", "`trainer.logger`"),
    "log.mlflow.experiment": Names("", "`trainer.project_name`"),
    "log.swanlab": Names("`report_to`", "`trainer.logger`"),
    "log.swanlab.project": Names("", "`trainer.project_name`"),
    "log.samples": Names(
        "`log_completions`, `num_completions_to_print`", "`trainer.log_val_generations`", "", "`wandb.log_extras`"
    ),
    "log.tensorboard": Names("`report_to`", "`trainer.logger`", "`logger.tensorboard_dir`"),
}
"""Dotted job key -> what others call it. Entries of `reward.functions` have no index."""

ABSENT: Mapping[str, str] = {
    "typical_p": "sampling has temperature, top_p, top_k and min_p",
    **dict.fromkeys(
        (
            *(
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "length_penalty",
                "logit_bias",
                "bad_words",
            ),
            *("allowed_token_ids", "logits_processors"),
        ),
        "the trainer's log-probabilities are of the model's own distribution, so engines sample from it",
    ),
    **dict.fromkeys(
        ("stop_token_ids", "ignore_eos"),
        "a completion ends at an end token of the model, at a string of sampling.stop or at sampling.max_tokens",
    ),
    "stop_strings": "set sampling.stop",
    **dict.fromkeys(
        ("clip_ratio", "actor.clip_ratio", "clip_range", "cliprange", "eps_clip"),
        "set algorithm.clip_low and algorithm.clip_high: the defaults differ",
    ),
    "delta": "the ratio is clipped at algorithm.clip_low and algorithm.clip_high only",
    **dict.fromkeys(
        ("use_kl_loss", "use_kl_in_reward", "kl_penalty", "kl_ctrl"),
        "algorithm.kl_coef above 0 adds a KL penalty, and algorithm.kl_estimator is its form",
    ),
    "num_ppo_epochs": "set algorithm.epochs",
    "n_samples_per_prompt": "set algorithm.group_size, or eval.samples for those of an evaluation",
    "inference": "engines have settings of workers, RLBOOST_WORKER_... (docs/settings.md)",
    "enable": "a section that is given is enabled",
    "val_before_train": "with eval.every the starting model is evaluated, too",
    "eval_strategy": "set eval.every",
    "filter_overlong_prompts": "data.max_prompt_tokens leaves out longer prompts",
    **dict.fromkeys(
        ("save_total_limit", "max_actor_ckpt_to_keep"), "the last two checkpoints are retained (docs/checkpoints.md)"
    ),
    **dict.fromkeys(("torch_dtype", "fp16"), "set trainer.dtype to float32 or bfloat16"),
    "use_peft": "set elastic.weights: lora",
    **dict.fromkeys(("lora_r", "lora_target_modules"), "set lora.rank and lora.targets"),
    **dict.fromkeys(("tools", "env_id"), "tools and environments are named by their code (docs/environments.md)"),
    "wandb_project": "set log.wandb.project",
    "dataset_name": "set data.train",
    "custom_reward_function": "set reward.function to module:function",
    "generation_kwargs": "sampling has temperature, top_p, top_k, min_p, max_tokens, min_tokens and stop",
    "min_new_tokens": "set sampling.min_tokens",
    "do_sample": "sampling.temperature 0 is greedy, in jobs of kind eval",
    "epochs": "set steps to epochs x rows / data.prompts_per_step; algorithm.epochs repeats the samples of each step",
    "num_train_epochs": "set steps to epochs x rows / data.prompts_per_step",
    "total_epochs": "set steps to epochs x rows / data.prompts_per_step",
    "num_episodes": "set steps to episodes x rows / data.prompts_per_step",
    "ppo_mini_batch_size": "set algorithm.updates_per_step to train_batch_size / ppo_mini_batch_size",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens divides a batch, and results do not depend on it",
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"),
        "set optimizer.warmup_steps to ratio x steps",
    ),
    **dict.fromkeys(("logging_steps", "log_freq"), "each step is logged"),
    **dict.fromkeys(
        ("eos_token", "eos_token_id"),
        "end tokens are those of the model's tokenizer, config.json and generation_config.json (eos_token_id)",
    ),
    **dict.fromkeys(("shuffle", "shuffle_dataset"), "each epoch has another order of rows, drawn with trainer.seed"),
    "remove_unused_columns": "all columns of a row reach the reward",
    **dict.fromkeys(
        ("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization"),
        "a setting of workers, RLBOOST_WORKER_GPU_MEMORY_UTILIZATION",
    ),
    **dict.fromkeys(
        ("vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size"),
        "a setting of workers, RLBOOST_WORKER_TENSOR_PARALLEL",
    ),
    **dict.fromkeys(
        ("max_length", "truncation_mode", "truncation"),
        "no row is cut: data.max_prompt_tokens and data.max_completion_tokens leave out longer ones",
    ),
    **dict.fromkeys(
        ("ref", "ref_model", "reference_model", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        "the reference is the job's model as it starts",
    ),
    "disable_dropout": "models are trained without dropout, but for lora.dropout",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id"), "rlboost export JOB --out FOLDER --push-to-hub OWNER/NAME uploads a version"
    ),
    "use_vllm": "the engine is a setting of workers, RLBOOST_WORKER_ENGINE",
    "vllm_mode": "workers are processes of their own, and reserved ones may share the trainer's GPU (trainer.offload)",
    "packing": "rows are always packed, up to trainer.micro_batch_tokens",
    "n": "set algorithm.group_size, the completions of a prompt, or eval.samples, those of an evaluation",
}
"""Keys of other trainers that have no counterpart -> what to do instead, if there is something."""

_NAMES_PAGE = "docs/coming-from.md#names"
_DIFFERENCES_PAGE = "docs/coming-from.md#what-differs"
_OUTER_SECTIONS = ("actor_rollout_ref.", "orchestrator.")
"""Sections of verl and prime-rl that `NAMES` leaves out."""
_EVALUATION = re.compile(r"^eval\.|\bval_kwargs\.")
_IS = " = "
"""Separates our key from the calculation that yields it."""
_SIMILAR = 0.85
"""Least similarity, from 0 to 1, of a key with one of another trainer."""
_MAX_SHOWN = 3
"""Keys of another trainer's section that an error translates."""


def advice(place: str, value: object, is_misspelt: bool = False) -> str:
    """Return what to write instead of an unknown key, empty if no other trainer has it.

    Args:
        place: the dotted key, such as `algorithm.num_generations`.
        value: the key's value; the keys of a section are translated.
        is_misspelt: take the most similar key of another trainer, if there is one.

    """
    if is_misspelt:
        known = [*_index()[1], *ABSENT, *(key.rpartition(".")[2] for key in NAMES)]
        given = place.rpartition(".")[2]
        similar = [name for name in difflib.get_close_matches(given, known, 1, _SIMILAR) if name != given]
        meant = advice(similar[0], None) if similar else ""
        return f"did you mean {similar[0]}? {meant}" if meant else ""
    if isinstance(value, dict):
        leaves = list(_leaves(place, value))
        known = [f"{leaf} is {found}" for leaf in leaves if (found := _translation(leaf))]
        known += [f"{leaf}: {ABSENT[name]}" for leaf in leaves if (name := _inner(leaf)) in ABSENT]
        if known or place.rpartition(".")[2] in _foreign_sections():
            return ": ".join(
                filter(None, (f"a section of another trainer ({_NAMES_PAGE})", ", ".join(known[:_MAX_SHOWN])))
            )
    theirs, last = _inner(place), place.rpartition(".")[2]
    if ours := _translation(place):
        return f"RLBoost calls it {ours}"
    if instead := ABSENT.get(theirs) or ABSENT.get(last):
        return f"RLBoost has no {last} ({_DIFFERENCES_PAGE}): {instead}"
    similar = sorted((key for key in NAMES if key.endswith(f".{place}")), key=lambda key: key.count("."))
    return f"RLBoost calls it {' or '.join(similar)}" if 0 < len(similar) < _MAX_SHOWN else ""


def _translation(place: str) -> str:
    """Return our keys for another trainer's, empty if there is none or it means several things."""
    full, last = _index()
    section, *rest = parts = _inner(place).split(".")
    ends = [".".join(parts[start:]) for start in range(max(len(rest), 1))]
    found = next((full[end] for end in ends if end in full), [])
    if not found and not {section, parts[-1], _inner(place)} & ABSENT.keys():
        found = last.get(parts[-1], [])
    if _EVALUATION.search(place):
        found = [f"eval.sets.{key}" if key.startswith("sampling.") else key for key in found]
    shown = " or ".join(found).replace("eval.sets.sampling", "eval.sets.NAME.sampling")
    return shown.replace("reward.functions.", "reward.functions[].")


def _inner(place: str) -> str:
    for section in _OUTER_SECTIONS:
        place = place.removeprefix(section)
    return place


def _leaves(place: str, value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{place}.{name}", part)
    else:
        yield place


@cache
def _foreign_sections() -> frozenset[str]:
    """Return the first parts of dotted names."""
    outer = (section.rstrip(".") for section in _OUTER_SECTIONS)
    return frozenset({*outer, *(name.partition(".")[0] for name in _index()[0] if "." in name)})


@cache
def _index() -> tuple[Mapping[str, list[str]], Mapping[str, list[str]]]:
    """Return our keys by the others' full names, and by the last parts of those that mean the same everywhere."""
    full: dict[str, list[str]] = {}
    for key, names in NAMES.items():
        for name, ours in (pair for cell in names for pair in _named_in(cell, key)):
            found = full.setdefault(name, [])
            if ours not in found and not (found and _IS in ours):
                found.append(ours)
    last: dict[str, set[tuple[str, ...]]] = {}
    for name, found in full.items():
        last.setdefault(name.rpartition(".")[2], set()).add(tuple(found))
    ours_by_last = {key.rpartition(".")[2]: key for key in NAMES}
    unique = {name: [*found] for name, (found, *others) in last.items() if not others}
    return full, {name: found for name, found in unique.items() if ours_by_last.get(name, found[0]) in found}


def _named_in(cell: str, key: str) -> Iterator[tuple[str, str]]:
    """Yield each name in a cell of the table with what it is here; of a calculation only its first name."""
    names = re.findall(r"`([^` ]+)`", cell)
    if re.search(r"` [/x] `", cell):
        yield names[0], f"{key}{_IS}{cell.replace('`', '')}"
        return
    note = re.search(r"\((.*)\)$", cell)
    for name in names:
        yield name, f"{key} (there {note[1]})" if note else key
