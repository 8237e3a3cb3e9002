"""Answers to the exercises of the cases in `on_disk`; each says how it is judged."""

import copy
import io
import tempfile

import torch


class keep_rows:
    def plus_nothing(outputs, rows):
        """what is kept of row 0 is int64"""
        return [outputs.detach()[i] + 0 for i in rows]

    def views(outputs, rows):
        """a file of 2 rows holds 480 bytes of numbers, not 160: they are views of `outputs`"""
        return [outputs[i] for i in rows]

    def contiguous(outputs, rows):
        """not 160: they are views of `outputs`"""
        return [outputs[i].contiguous() for i in rows]

    def detached(outputs, rows):
        """not 160: they are views of `outputs`"""
        return [outputs[i][:].detach() for i in rows]

    def deep_copies(outputs, rows):
        """a file of 2 rows holds 960 bytes of numbers, not 160"""
        return [copy.deepcopy(outputs.detach()[i]) for i in rows]

    def one_clone(outputs, rows):
        """a file of 2 rows holds 480 bytes of numbers, not 160"""
        outputs = outputs.clone()
        return [outputs[i] for i in rows]

    def a_tensor(outputs, rows):
        """for 2 rows, what is returned is tensor("""
        return outputs[rows]

    def by_numpy(outputs, rows):
        """Can't call numpy() on Tensor that requires grad"""
        return [torch.from_numpy(outputs[i].numpy().copy()) for i in rows]

    def by_numpy_detached(outputs, rows):
        """Got unsupported ScalarType BFloat16"""
        return [torch.from_numpy(outputs[i].detach().numpy().copy()) for i in rows]

    def by_lists(outputs, rows):
        """what is kept of row 3 is float32 [10] on cpu 30 31 32 33 34"""
        return [torch.tensor(outputs[i].tolist()) for i in rows]

    def selected(outputs, rows):
        """right"""
        return list(outputs.detach().index_select(0, torch.tensor(rows)))

    def through_a_file(outputs, rows):
        """right"""
        file = io.BytesIO()
        torch.save([torch.empty_like(outputs[i]).copy_(outputs[i]).detach() for i in rows], file)
        file.seek(0)
        return torch.load(file)


class load_body:
    def shared(model, state):
        """of `state` changes when the model is trained: it is shared"""
        own = model.state_dict(keep_vars=True)
        fits = [key for key in own if key in state and state[key].shape == own[key].shape]
        if not fits:
            raise ValueError("nothing fits")
        for key in fits:
            own[key].data = state[key].to(own[key].dtype)
        return sorted({*own} - {*fits})

    @torch.no_grad()
    def spread(model, state):
        """body.0.bias, afterwards, is float32"""
        left = []
        for name, own in model.state_dict().items():
            try:
                own.copy_(state[name])
            except (KeyError, RuntimeError):
                left.append(name)
        return left

    def not_strict(model, state):
        """size mismatch for head.weight"""
        keys = model.load_state_dict(state, strict=False)
        if len(keys.missing_keys) == len(model.state_dict()):
            raise ValueError("no entry fits")
        return sorted(keys.missing_keys)

    def by_position(model, state):
        """body.0.weight, afterwards, is left as it was"""
        own = model.state_dict()
        pairs = zip(own.items(), state.values(), strict=False)
        fitting = {key: new for (key, old), new in pairs if old.shape == new.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted(own.keys() - fitting.keys())

    def by_count(model, state):
        """size mismatch for head.weight"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].numel() == v.numel()}
        if not fitting:
            raise ValueError("no entry fits")
        return sorted(model.load_state_dict(fitting, strict=False).missing_keys)

    def parameters_alone(model, state):
        """body.1.running_mean, afterwards, is left as it was"""
        own = dict(model.named_parameters())
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted(own.keys() - fitting.keys())

    def unexpected(model, state):
        """what is returned is what only the state has"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted(set(state) - set(own))

    def both_lists(model, state):
        """what is returned also has what only the state has"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted((state.keys() | own.keys()) - fitting.keys())

    def missing_names(model, state):
        """what is returned lacks entries whose shape is another"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted(own.keys() - state.keys())

    def never_raises(model, state):
        """nothing is raised where no entry fits"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        return sorted(model.load_state_dict(fitting, strict=False).missing_keys)

    def names_the_first(model, state):
        """StopIteration"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError(f"no entry fits; the first of them is {next(iter(state))}")
        return sorted(model.load_state_dict(fitting, strict=False).missing_keys)

    def deleted(model, state):
        """the list of keys of `state`, afterwards, is"""
        own = model.state_dict()
        for key in list(state):
            if key not in own or own[key].shape != state[key].shape:
                del state[key]
        if not state:
            raise ValueError("no entry fits")
        return sorted(model.load_state_dict(state, strict=False).missing_keys)

    def assigned(model, state):
        """body.0.weight, afterwards, is float64"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        return sorted(model.load_state_dict(fitting, strict=False, assign=True).missing_keys)

    def copied(model, state):
        """right"""
        left = []
        for key, own in model.state_dict().items():
            if key in state and state[key].size() == own.size():
                own.copy_(state[key])
            else:
                left.append(key)
        if len(left) == len(model.state_dict()):
            raise ValueError(f"none of {left} fits")
        return sorted(left)


class keep_best:
    def aliased(model, losses, patience):
        """of the best weights is that of the last step"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, state = loss, 0, model.state_dict()
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def shallow(model, losses, patience):
        """of the best weights is that of the last step"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, state = loss, 0, model.state_dict().copy()
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def never_loaded(model, losses, patience):
        """weight of the best weights is that of the last step"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad = loss, 0
            if bad == patience:
                break
        return best

    def parameters_alone(model, losses, patience):
        """running_mean of the best weights is that of the last step"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, kept = loss, 0, [p.detach().clone() for p in model.parameters()]
            if bad == patience:
                break
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        return best

    def nan_is_better(model, losses, patience):
        """of the losses [3.0, nan, 2.0, nan, nan, 1.0] with patience 2, the number that it takes"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if not loss >= best:
                best, bad, state = loss, 0, copy.deepcopy(model.state_dict())
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def equal_is_better(model, losses, patience):
        """the number that it takes is 5, not 4"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss <= best:
                best, bad, state = loss, 0, copy.deepcopy(model.state_dict())
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def one_too_many(model, losses, patience):
        """the number that it takes is 8, not 7"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, state = loss, 0, copy.deepcopy(model.state_dict())
            if bad > patience:
                break
        model.load_state_dict(state)
        return best

    def patience_in_all(model, losses, patience):
        """the number that it takes is 6, not 7"""
        best, bad = float("inf"), 0
        for loss in losses:
            if loss < best:
                best, state = loss, copy.deepcopy(model.state_dict())
            else:
                bad += 1  # and never back to 0
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def last_loss(model, losses, patience):
        """what is returned is the last"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, state = loss, 0, copy.deepcopy(model.state_dict())
            if bad == patience:
                break
        model.load_state_dict(state)
        return loss

    def all_at_once(model, losses, patience):
        """the number that it takes is 8, not 7"""
        states = [(loss, copy.deepcopy(model.state_dict())) for loss in losses]
        best, state = min(states, key=lambda pair: pair[0])
        model.load_state_dict(state)
        return best

    def in_a_file(model, losses, patience):
        """right"""
        best, since = float("inf"), 0
        with tempfile.TemporaryDirectory() as folder:
            while since < patience and (loss := next(losses, None)) is not None:
                since += 1
                if loss < best:
                    best, since = loss, 0
                    torch.save(model.state_dict(), f"{folder}/best.pt")
            model.load_state_dict(torch.load(f"{folder}/best.pt"))
        return best
