"""The whole update as it is specified: one step, discount, critic and sample at a time, critics on concatenated inputs,
autograd through everything, beyond the encoders in float64. Slow; shares nothing with the agent but encoders and
distributions."""

from itertools import product

import torch
from torch.nn import functional as F

from pipelines.lake.spaces import Discrete
from pipelines.nets.actor import Categorical
from pipelines.nets.critic import ActionValues
from pipelines.nets.inputs import to_features


def symlog(x):
    return x.sign() * (1 + x.abs()).log()


def symexp(x):
    return x.sign() * (x.abs().exp() - 1)


class Literal:
    """`agent` is used up: its statistics move, its parameters receive gradients."""

    def __init__(self, agent, weights, *, critic, samples=(1, 1), label_smoothing=0.0):
        self.agent, self.settings, self.critic_kind, self.label_smoothing = (
            agent,
            agent.settings,
            critic,
            label_smoothing,
        )
        self.online, self.offline = weights
        self.samples = samples
        self.gammas = [*agent.settings.gammas, agent.settings.acting_gamma]
        self.metrics = {}
        for part in (agent.heads, agent.target_heads, agent.popart, agent.advantage_scale):
            if part is not None:
                part.double()

    # critics

    def outputs(self, critic, c, h, action, g, frozen=False):
        """The last layer's numbers for one critic."""
        x = h if action is None else torch.cat((h, action, symlog(torch.tensor([1 / (1 - self.gammas[g])]))))
        tensors = [*critic.weights, critic.last_weight], [*critic.biases, critic.last_bias]
        for place, (weight, bias) in enumerate(zip(*tensors, strict=True)):
            weight, bias = (weight.detach(), bias.detach()) if frozen else (weight, bias)
            x = x @ weight[c] + bias[c, 0]
            if place < len(critic.weights):
                x = F.leaky_relu(x, 0.01)
        return x

    def value(self, critic, c, h, action, g, frozen=False):
        if self.critic_kind == "two-hot":
            mean = (self.outputs(critic, c, h, action, g, frozen).softmax(0) * self.bins()).sum()
            return symexp(mean) if self.settings.critic.symlog else mean
        return self.outputs(critic, c, h, action, g, frozen)[g]

    def table(self, critic, c, h, g):
        return self.outputs(critic, c, h, None, g).view(len(self.gammas), -1)[g]

    def bins(self):
        settings = self.settings.critic
        ends = torch.tensor([settings.low, settings.high], dtype=torch.float64)
        ends = symlog(ends) if settings.symlog else ends
        return torch.linspace(*ends.tolist(), settings.bins, dtype=torch.float64)

    def is_table(self, critic):
        return isinstance(critic, ActionValues)

    def shown(self, feature):
        return feature.clamp(self.label_smoothing, 1 - self.label_smoothing) if self.label_smoothing else feature

    def value_of_state(self, heads, actor, c, h, g, noise, legal, frozen=False):
        """Values (samples,) of the policy's actions, or their expectation (1,); gradient to the policy."""
        params = actor(h)[g]
        if self.is_table(heads.critic):
            values = self.table(heads.critic, c, h.detach(), g)
            return ((values.detach() if frozen else values) * heads.policy.probs(params, legal)).sum()[None]
        values = []
        for uniform in noise:
            action = heads.policy.sample(params, uniform, legal)
            if self.label_smoothing:
                action = self.label_smoothing + (1 - 2 * self.label_smoothing) * action
            values.append(self.value(heads.critic, c, h.detach(), action, g, frozen))
        return torch.stack(values)

    def denormalized(self, value, g):
        popart = self.agent.popart
        return value if self.critic_kind == "two-hot" else value * popart.sigma_G[g] + popart.mu_G[g]

    def normalized(self, value, g):
        return (value - self.agent.popart.mu_G[g]) / self.agent.popart.sigma_G[g]

    def critic_error(self, c, h, action, index, g, y):
        critic = self.agent.heads.critic
        if self.critic_kind == "two-hot":
            settings = self.settings.critic
            bins = self.bins()
            label = torch.zeros(settings.bins, dtype=torch.float64)
            y = (symlog(y) if settings.symlog else y).clamp(bins[0], bins[-1])
            if settings.labels == "two-hot":
                above = int((bins < y).sum().clamp(1, settings.bins - 1))
                share = (y - bins[above - 1]) / (bins[above] - bins[above - 1])
                label[above - 1], label[above] = 1 - share, share
            else:
                step = bins[1] - bins[0]
                normal = torch.distributions.Normal(y, settings.label_sigma * step)
                label = normal.cdf(bins + step / 2) - normal.cdf(bins - step / 2)
                label = label / label.sum()
            return -(label * self.outputs(critic, c, h, action, g).log_softmax(0)).sum()
        q = self.table(critic, c, h, g)[index] if self.is_table(critic) else self.value(critic, c, h, action, g)
        return (q - self.normalized(y, g)).square()

    # the update

    def draws(self, rows, samples, generator):
        size = samples * self.agent.heads.noise_size
        noise = torch.rand(rows, len(self.gammas), size + self.settings.critic.ensemble, generator=generator).double()
        split = noise[..., :size].reshape(rows, len(self.gammas), samples, -1)
        return split, noise[..., size:].argsort(-1, descending=True)[..., : self.settings.critic.subset]

    def number(self, taken):
        """The number of the choice that an action is: of the nearest point of a grid; None without choices."""
        actor = self.settings.actor
        if isinstance(self.agent.spaces.action, Discrete):
            return int(taken)
        if actor.distribution != "grid":
            return None
        values = [-1 + 2 * k / (actor.grid_points - 1) for k in range(actor.grid_points)]
        points = torch.tensor([*product(values, repeat=taken.numel())])
        return int((points - taken.flatten()).square().sum(1).argmin())

    def legal(self, data, b, t):
        name = self.settings.action_mask
        return data.observation[name][b, t] > 0 if name else None

    def next_value(self, data, h, b, t, i, g, noise, drawn):
        agent = self.agent
        actor = agent.target_heads.actor if self.settings.target_actor else agent.heads.actor
        heads, legal = agent.target_heads, self.legal(data, b, t + 1)
        state = h[b, t + 1]
        of = [self.value_of_state(heads, actor, c, state, g, noise[i, g], legal).mean() for c in drawn[i, g].tolist()]
        return self.denormalized(torch.stack(of).min() if self.online > 0 else torch.stack(of).mean(), g)

    def taken_after(self, data, h, b, t, i, g, drawn):
        """Of the action taken after step t: its value by the drawn critic that is least for the policy, its
        probability, and the number of choices."""
        agent, state, taken = self.agent, h[b, t + 1], self.number(data.action[b, t + 2])
        actor = agent.target_heads.actor if self.settings.target_actor else agent.heads.actor
        probs = agent.heads.policy.probs(actor(state)[g], self.legal(data, b, t + 1))
        tables = [self.table(agent.target_heads.critic, c, state, g) for c in drawn[i, g].tolist()]
        least = min(tables, key=lambda values: float((values * probs).sum()))
        return self.denormalized(least[taken], g), probs[taken], len(probs)

    def vtrace(self, data, h, b, t, g, noise, drawn, place):
        """v of the state after step t, equation 1 of IMPALA (arXiv 1802.01561): V(x_s) plus the sum over k >= s of
        gamma^(k - s) c_s ... c_(k - 1) rho_k (r_k + gamma V(x_(k + 1)) - V(x_k))."""
        gamma, scale = self.gammas[g], self.settings.reward_scale
        before = value = self.next_value(data, h, b, t, place[b, t], g, noise, drawn)
        factor, k = 1.0, t + 1
        while (b, k) in place:
            _, prob, _ = self.taken_after(data, h, b, k - 1, place[b, k - 1], g, drawn)
            rho = min(prob / data.logp[b, k + 1].double().exp(), 1.0)
            after = 0.0 if data.terminated[b, k] else self.next_value(data, h, b, k, place[b, k], g, noise, drawn)
            value = value + factor * rho * (scale * data.reward[b, k + 1] + gamma * after - before)
            if data.terminated[b, k]:
                break
            factor, before, k = factor * gamma * self.settings.trace_decay * rho, after, k + 1
        return value

    @torch.no_grad()
    def targets(self, data, h, rows, generator):
        noise, drawn = self.draws(len(rows), self.samples[0], generator)
        out = torch.zeros(len(rows), len(self.gammas), dtype=torch.float64)
        place = {row: i for i, row in enumerate(rows)}
        if self.settings.trace == "vtrace":
            for (i, (b, t)), (g, gamma) in product(enumerate(rows), enumerate(self.gammas)):
                out[i, g] = self.settings.reward_scale * data.reward[b, t + 1]
                if not data.terminated[b, t]:
                    out[i, g] += gamma * self.vtrace(data, h, b, t, g, noise, drawn, place)
            return out
        if self.settings.trace != "none":
            for b, t in reversed(rows):
                for g, gamma in enumerate(self.gammas):
                    i = place[b, t]
                    out[i, g] = self.settings.reward_scale * data.reward[b, t + 1]
                    if data.terminated[b, t]:
                        continue
                    value = self.next_value(data, h, b, t, i, g, noise, drawn)
                    if (b, t + 1) in place:
                        if self.settings.trace == "peng":
                            correction, share = out[place[b, t + 1], g] - value, self.settings.trace_decay
                        else:
                            q, prob, choices = self.taken_after(data, h, b, t, i, g, drawn)
                            if self.settings.trace == "retrace":
                                legal = self.legal(data, b, t + 1)
                                possible = choices if legal is None else int(legal.sum())
                                behaviour = 1 / possible if data.logp is None else data.logp[b, t + 2].double().exp()
                                prob = min(prob / behaviour, 1.0)
                            correction, share = out[place[b, t + 1], g] - q, self.settings.trace_decay * prob
                        value = value + share * correction
                    out[i, g] += gamma * value
            return out
        for i, (b, t) in enumerate(rows):
            for g, gamma in enumerate(self.gammas):
                for k in range(self.settings.n_step):
                    at = (b, t + k)
                    out[i, g] += gamma**k * self.settings.reward_scale * data.reward[b, t + k + 1]
                    if data.terminated[at]:
                        break
                    if k + 1 == self.settings.n_step or (b, t + k + 1) not in place:
                        out[i, g] += gamma ** (k + 1) * self.next_value(data, h, *at, place[at], g, noise, drawn)
                        break
        return out

    @torch.no_grad()
    def move_popart(self, y):
        """Statistics, and the last layers that keep their outputs.

        Sums of all batches so far, each weighted by (1 - beta)^age, over the sum of these weights.
        """
        popart, beta = self.agent.popart, self.settings.popart.beta
        if not self.settings.popart.enabled:
            return
        mu, sigma, past = popart.mu_G.clone(), popart.sigma_G.clone(), int(popart.updates)
        weights = sum((1 - beta) ** age for age in range(1, past + 1))
        second = popart.variance_G + mu.square()
        mean = (weights * mu + y.mean(0)) / (weights + 1)
        popart.mu_G.copy_(mean)
        popart.variance_G.copy_((weights * second + y.square().mean(0)) / (weights + 1) - mean.square())
        popart.updates.add_(1)
        if past == 0:
            return
        if self.critic_kind == "two-hot":
            return
        for heads in (self.agent.heads, self.agent.target_heads):
            critic = heads.critic
            parts = critic.last_weight.shape[-1] // len(self.gammas)
            for column in range(critic.last_weight.shape[-1]):
                g = column // parts
                critic.last_weight[..., column] *= sigma[g] / popart.sigma_G[g]
                bias = critic.last_bias[..., column] * sigma[g] + mu[g] - popart.mu_G[g]
                critic.last_bias[..., column] = bias / popart.sigma_G[g]

    @torch.no_grad()
    def unit(self, g):
        """What the value that the policy maximises is divided by, in normalised units."""
        scale, sigma = self.agent.advantage_scale, self.agent.popart.sigma_G[g]
        if scale is None or not scale.updates:
            return 1.0
        if not scale.reward_updates:
            return float("inf")
        return max(scale.square_G[g] ** 0.5, 0.02 * scale.reward_square**0.5) / sigma

    @torch.no_grad()
    def move_advantage_scale(self, data, h, rows):
        """Averages of squared advantages, of every possible action, and of squared rewards other than 0."""
        scale, critic = self.agent.advantage_scale, self.agent.heads.critic
        if scale is None:
            return
        squares = torch.zeros(len(self.gammas), dtype=torch.float64)
        for b, t in rows:
            legal = self.legal(data, b, t)
            for g in range(len(self.gammas)):
                tables = [self.table(critic, c, h[b, t], g) for c in range(self.settings.critic.ensemble)]
                values = torch.stack(tables).mean(0) * self.agent.popart.sigma_G[g]
                values = values if legal is None or not legal.any() else values[legal]
                squares[g] += (values - values.mean()).square().mean() / len(rows)
        rewards = [self.settings.reward_scale * float(data.reward[b, t + 1]) for b, t in rows]
        rewards = torch.tensor([reward for reward in rewards if reward], dtype=torch.float64)
        scale.updates += 1
        step = max(1 / int(scale.updates), 0.01)
        scale.square_G.copy_((1 - step) * scale.square_G + step * squares)
        if len(rewards):
            scale.reward_updates += 1
            step = max(1 / int(scale.reward_updates), 0.01)
            scale.reward_square.copy_((1 - step) * scale.reward_square + step * rewards.square().mean())

    def loss(self, data, generator):
        agent, settings = self.agent, self.settings
        agent._update_statistics([data])
        h = agent.encode(data).double()
        rows = [tuple(row) for row in data.mask.nonzero().tolist()]
        y = self.targets(data, h, rows, generator)
        self.move_popart(y)
        noise, drawn = self.draws(len(rows), self.samples[1], generator)
        members, discounts = settings.critic.ensemble, len(self.gammas)
        advantage = torch.zeros(*data.mask.shape, discounts, dtype=torch.float64)
        critic_loss = online = offline = entropy = divergence = 0.0
        near = None if agent.reference is None else agent.reference.agent.encode(data).double()
        log_probs, ratio = {}, {}
        taught = data.mask if data.actor_counted is None else data.actor_counted.mask_BT
        for i, (b, t) in enumerate(rows):
            taken = data.action[b, t + 1]
            index = self.number(taken)
            action = self.shown(to_features(taken, agent.spaces.action).double())
            legal, state = self.legal(data, b, t), h[b, t]
            importance = 1.0 if data.importance is None else data.importance[b]
            lesson = importance * taught[b, t]
            for g in range(discounts):
                q, v = [], []
                critic, actor = agent.heads.critic, agent.heads.actor
                for c in range(members):
                    error = self.critic_error(c, state, action, index, g, y[i, g])
                    critic_loss = critic_loss + importance * error / (members * discounts)
                    with torch.no_grad():
                        if self.is_table(critic):
                            q.append(self.table(critic, c, state, g)[index])
                        else:
                            q.append(self.value(critic, c, state, action, g))
                    v.append(self.value_of_state(agent.heads, actor, c, state, g, noise[i, g], legal, frozen=True))
                if self.online > 0:
                    least = torch.stack([v[c].mean() for c in drawn[i, g].tolist()]).min()
                    if self.critic_kind == "two-hot":
                        least = self.normalized(least, g)
                    online = online - lesson * least / self.unit(g) / discounts
                difference = (torch.stack(q)[:, None] - torch.stack(v).detach()).mean()
                scaled = difference * (1 if self.critic_kind == "two-hot" else agent.popart.sigma_G[g])
                advantage[b, t, g] = scaled / settings.reward_scale
                policy = agent.heads.policy
                entropy = entropy + lesson * policy.action_entropy(agent.heads.actor(state)[g], legal) / discounts
                log_probs[b, t, g] = agent.heads.policy.log_prob(agent.heads.actor(state)[g], taken, legal)
                if near is not None:
                    known = agent.reference.agent.gammas
                    place = known.index(self.gammas[g]) if self.gammas[g] in known else -1
                    theirs = agent.reference.agent.heads.double().actor(near[b, t])[place].detach()
                    found = self.divergence(agent.heads.actor(state)[g], theirs, legal)
                    divergence = divergence + lesson * found / discounts
                    if settings.reference_ratio:
                        prob = agent.reference.agent.heads.policy.log_prob(theirs, taken, legal).exp()
                        behaviour = data.logp[b, t + 1].double().exp()
                        ratio[b, t, g] = min(prob / behaviour, settings.reference_ratio)
        weight = agent.filter(advantage, data.mask[..., None])
        for (b, t, g), log_prob in log_probs.items():
            importance = 1.0 if data.importance is None else data.importance[b]
            shown = importance * taught[b, t] * weight[b, t, g] * ratio.get((b, t, g), 1.0)
            offline = offline - shown * log_prob / discounts
        self.move_advantage_scale(data, h, rows)
        lessons = max(int(taught.sum()), 1)
        actor = (self.online * online + self.offline * offline) / lessons
        critic_loss = critic_loss / len(rows)
        self.metrics = {"critic_loss": critic_loss, "actor_loss": actor}
        bonus = settings.reference_weight * divergence - settings.entropy_weight * entropy
        return actor + settings.critic_weight * critic_loss + bonus / lessons

    def divergence(self, ours, theirs, legal):
        """KL by torch's own distributions, those of a Gaussian before tanh."""
        policy = self.agent.heads.policy
        kl = torch.distributions.kl_divergence
        if isinstance(policy, Categorical):
            return kl(*(torch.distributions.Categorical(policy.probs(each, legal)) for each in (ours, theirs)))
        pairs = map(policy._split, (ours, theirs))
        return kl(*(torch.distributions.Normal(mean, log_std.exp()) for mean, log_std in pairs)).sum()
