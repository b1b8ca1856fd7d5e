"""TorchRL: advantages normalized over the rollouts of all ranks, PPO's loss a mean over all their frames."""

import contextlib
import dataclasses

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from trainings import RATE, Training, cell, row_of_the_table

import diffcoll as dc

FRAMES = 5


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.policy, self.value = nn.Linear(3, 4).double(), nn.Linear(3, 1).double()


def rollouts(rows, generator):
    def normal(*shape):
        return torch.randn(rows, FRAMES, *shape, generator=generator, dtype=torch.double)

    done = torch.zeros(rows, FRAMES, 1, dtype=torch.bool)
    done[:, -1] = True
    return normal(3), normal(3), normal(2).clamp(-1, 1), normal(1), done, normal(1).squeeze(-1)


def ppo(agent, observation, after, action, reward, done, log_prob, *, normalize=None):
    """PPO's loss of these rollouts; without `normalize` TorchRL normalizes their advantages."""
    split = nn.Module()  # loc and a positive scale, of the two halves
    split.forward = lambda out: (out[..., :2], out[..., 2:].exp())
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(agent.policy, ["observation"], ["out"]),
        TensorDictModule(split, ["out"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=lambda loc, scale: torch.distributions.Independent(
                torch.distributions.Normal(loc, scale), 1
            ),
            return_log_prob=True,
        ),
    )
    critic = TensorDictModule(agent.value, ["observation"], ["state_value"])
    later = {"observation": after, "reward": reward, "done": done, "terminated": done}
    data = TensorDict(
        {"observation": observation, "action": action, "action_log_prob": log_prob, "next": later}, done.shape[:2]
    )
    GAE(gamma=0.9, lmbda=0.8, value_network=critic, average_gae=normalize is None)(data)
    if normalize:
        data["advantage"] = normalize(data["advantage"])
    found = ClipPPOLoss(actor, critic, functional=False, normalize_advantage=False)(data)
    return found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]


def over_ranks(advantage):
    """As TorchRL on one process: the deviation is unbiased, and at least 1e-4."""
    count, mean, variance = dc.nn.functional.moments(advantage, (0, 1, 2))
    return (advantage - mean) / (variance * count / (count - 1)).sqrt().clamp_min(1e-4)


def share_of_ppo(agent, *rollout):
    frames = torch.tensor(float(len(rollout[0]) * FRAMES))
    return dc.get_world_size() * ppo(agent, *rollout, normalize=over_ranks) * frames / dc.all_reduce(frames)


def mean_of_ppo(agent, micro_batches):
    return sum(ppo(agent, *rollout) for rollout in micro_batches) / len(micro_batches)


PPO = Training(Agent, rollouts, share_of_ppo, mean_of_ppo, sizes=((3, 2, 4), (2, 5, 1)))


def with_averager(loss):
    def train(agent, updates):
        averager = dc.GradientAverager(agent)
        optimizer = torch.optim.SGD(agent.parameters(), RATE)
        for update in updates:
            for k, rollout in enumerate(update, 1):
                with averager.reduce() if k == len(update) else contextlib.nullcontext():
                    loss(agent, *rollout).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def test_ppo_as_one_process():
    PPO.assert_as_one_process(with_averager(share_of_ppo))


def test_factors_of_the_table():
    found = [PPO.factor(with_averager(share_of_ppo), micro_batches).values() for micro_batches in (1, 2)]
    row = row_of_the_table("[TorchRL](torchrl.md)")
    assert [set(map(cell, each)) for each in found] == [{row[0]}, {row[1]}]


def test_normalized_by_this_rank():
    """Also where all ranks have equally many rows."""
    equal = dataclasses.replace(PPO, sizes=((3, 3, 3),))
    found = equal.factor(with_averager(ppo))
    assert found["policy.weight"] == found["policy.bias"] == "wrong" and found["value.weight"] == 1


def test_a_mean_of_means():
    def mean_of_own(agent, *rollout):
        return ppo(agent, *rollout, normalize=over_ranks)

    assert PPO.factor(with_averager(mean_of_own))["policy.weight"] == "wrong"
