package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// NotFinitePolicy selects what [Trainer.Fit] and [Trainer.Evaluate] do when the loss of a batch, or a
// gradient or a norm to clip it by, is an infinity or NaN.
type NotFinitePolicy uint8

// The policies. All workers act in the same way under each of them.
const (
	// FailNotFinite ends with a [NotFiniteError]. No variable changes.
	FailNotFinite NotFinitePolicy = iota
	// WarnNotFinite logs a warning and takes the step. It logs the 1st, 2nd, 4th, 8th, … non-finite batch.
	WarnNotFinite
	// SkipNotFinite logs a warning, as WarnNotFinite does, and skips the step: no variable changes, and the
	// batch counts as skipped. If a variable itself is not finite, no later step can repair it, so this fails
	// as FailNotFinite does. Evaluate skips nothing; it only warns.
	SkipNotFinite
)

// String returns the policy's name: "error", "warn" or "skip".
func (p NotFinitePolicy) String() string {
	if names := [...]string{"error", "warn", "skip"}; int(p) < len(names) {
		return names[p]
	}
	return fmt.Sprintf("NotFinitePolicy(%d)", uint8(p))
}

// NotFiniteError reports that the loss of a global batch, a gradient, or a norm that gradients are clipped by, is an
// infinity or NaN, and names the first cause found. It is the same on all workers.
type NotFiniteError struct {
	// Step is the step in which it was found, from 1, as [Trainer.Steps] counts. For an evaluation, it is the
	// number of steps taken so far.
	Step int64
	// Loss is the loss of the whole global batch.
	Loss float64
	// Replica is the replica that Detail describes, or -1 if every replica's share is finite.
	Replica int
	// Example is the example that Detail describes, as an index into the global batch, or -1 if it describes
	// none. Batch is the number of that batch among those that the step accumulates, from 0; it is also set if Detail
	// describes a loss or a gradient, of which it is the first batch, and else -1.
	Example, Batch int
	// Detail describes the value that is not finite, or out of range, and how to fix it.
	Detail string

	evaluation bool
	norm       bool // the gradients are finite, a norm that they are clipped by is not
	persists   bool // a variable is not finite, so later steps fail too
}

// Error implements error.
func (e *NotFiniteError) Error() string {
	step := fmt.Sprintf("step %d", e.Step)
	if e.evaluation {
		step = fmt.Sprintf("the evaluation after step %d", e.Step)
	}
	what := fmt.Sprintf("the loss of %s is %v", step, e.Loss)
	switch {
	case finite(e.Loss) && e.norm:
		what = fmt.Sprintf("a norm of the gradients of %s is not finite, though its loss is %.4g", step, e.Loss)
	case finite(e.Loss):
		what = fmt.Sprintf("a gradient of %s is not finite, though its loss is %.4g", step, e.Loss)
	}
	if e.Replica >= 0 {
		return fmt.Sprintf("%s: on replica %d %s", what, e.Replica, e.Detail)
	}
	return fmt.Sprintf("%s: %s", what, e.Detail)
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// errNotFinite ends a step whose results must be discarded.
var errNotFinite = errors.New("not finite")

// tolerates reports whether the next non-finite batch is processed like any other, without a log entry.
func (t *Trainer) tolerates(evaluation bool) bool {
	n := t.notFinite + 1
	continues := t.config.NotFinite == WarnNotFinite || evaluation && t.config.NotFinite == SkipNotFinite
	return continues && n&(n-1) != 0
}

// allFinite reports whether loss, gradients and the norms to clip them by of the last step are finite on all replicas.
// The result is the same on every worker, because all replicas have the same sums.
func (t *Trainer) allFinite() bool {
	for i := range t.local {
		if t.local[i].notFinite >= 0 {
			return false
		}
	}
	if s, ok := t.exchange.(*sharded); ok && t.local[0].scalars[s.notFinite] != 0 {
		return false // an owner has noted one
	}
	return t.finiteLoss() && t.notFiniteNorm() == ""
}

func (t *Trainer) finiteLoss() bool { return finite(t.local[0].scalars[0]) }

// checkSum notes the sum of a gradient, from a block of its parameter on, if it is not finite and no sum of an earlier
// parameter is noted. It adds up the squares of the sum if gradients are clipped by a norm. The caller is number local
// of several replicas, each of which checks its part of the sum.
func (t *Trainer) checkSum(p *localReplica, sum *tensor.Tensor, parameter, from, local, locals int) {
	first := p.notFinite < 0 || parameter < p.notFinite
	if t.squares == nil {
		lo, hi := local*sum.Len()/locals, (local+1)*sum.Len()/locals
		if first && !kernel.FiniteBetween(sum, lo, hi) {
			p.notFinite = parameter
		}
		return
	}
	n := normBlocks(sum.Len())
	blocks := t.squares[parameter][from : from+n]
	for block := local * n / locals; block < (local+1)*n/locals; block++ {
		blocks[block] = blockSquares(sum, block)
		if first && !finite(blocks[block]) &&
			!kernel.FiniteBetween(sum, block*normBlock, min((block+1)*normBlock, sum.Len())) {
			p.notFinite, first = parameter, false
		}
	}
}

// reportNotFinite handles a batch that is not finite: it finds the cause, and returns it as an error or logs it. Every
// worker calls it. The caller must have discarded the step.
func (t *Trainer) reportNotFinite(ctx context.Context, b *stepBatches, evaluation bool) (*NotFiniteError, error) {
	e := &NotFiniteError{Step: t.committed, Loss: t.local[0].scalars[0], evaluation: evaluation}
	norm := ""
	if !evaluation {
		e.Step++
		norm = t.notFiniteNorm()
	}
	if err := t.inspect(ctx, b, e, norm); err != nil {
		return e, fmt.Errorf("%w; finding the cause: %w", e, err)
	}
	if t.config.NotFinite == FailNotFinite || e.persists && !evaluation && t.config.NotFinite == SkipNotFinite {
		return e, e
	}
	if t.notFinite++; t.notFinite&(t.notFinite-1) == 0 {
		does := "the step is taken"
		switch {
		case evaluation:
			does = "the evaluation continues"
		case t.config.NotFinite == SkipNotFinite:
			does = "the step is skipped"
		}
		t.config.Logger.Warn("train: not finite: "+does, "why", e.Error(), "so far", t.notFinite)
	}
	return e, nil
}

// finding is what one replica found in its share of a batch.
type finding struct {
	Cause   cause  `json:"cause"`
	Example int    `json:"example"` // in the global batch; -1: none
	Batch   int    `json:"batch"`   // of the step
	Detail  string `json:"detail"`
	Sum     int    `json:"sum"` // the first parameter whose gradient's sum over replicas is not finite; -1: none
}

// cause orders findings: a cause comes before its consequences.
type cause uint8

const (
	causeVariable cause = iota
	causeInput
	causeLabel
	causeFrozen
	causeLoss
	causeGradient
	causeNone
)

// inspect completes e. Every replica recomputes its share of the step's batches with the same values and random
// numbers, looks for values that are not finite, and sends its finding to all others. norm names a norm that is not
// finite.
func (t *Trainer) inspect(ctx context.Context, b *stepBatches, e *NotFiniteError, norm string) error {
	sums := make([]int, len(t.local))
	for i := range sums {
		sums[i] = t.local[i].notFinite
	}
	var findings []finding
	s := t.inner
	if e.evaluation {
		s = t.strategy
	}
	err := t.runOn(ctx, s, func(ctx context.Context, r *distribute.Replica) error {
		f := finding{Cause: causeNone, Example: -1}
		for i, g := range b.list {
			if g.weightSum == 0 {
				continue
			}
			gradients, err := t.gradientsUpTo(ctx, r, b, i, e.evaluation)
			if err != nil {
				return err
			}
			if f.Cause != causeNone {
				continue // the other replicas need this one for the model's own all-reduces
			}
			if f, err = t.find(r, g, gradients); err != nil {
				return err
			}
			f.Batch = i
		}
		f.Sum = sums[r.LocalID()]
		all, err := fromReplicas(ctx, r, f)
		if r.LocalID() == 0 {
			findings = all
		}
		return err
	})
	t.program.Discard()
	if err != nil {
		return err
	}
	e.conclude(findings, t.Parameters(), t.config.Exchange.codec(), norm, !e.evaluation && t.stepsWhole(b))
	if e.Replica >= 0 && s != t.strategy {
		e.Replica = t.ids()[e.Replica] // only this worker's have computed
	}
	return nil
}

// gradientsUpTo computes the gradients of batch i of a step, and returns their sums with those of the batches before
// it, whose gradients were computed last. For an evaluation, whose loss was just computed, it does nothing.
func (t *Trainer) gradientsUpTo(ctx context.Context, r *distribute.Replica, b *stepBatches, i int, evaluation bool,
) (gradients []*tensor.Tensor, err error) {
	if evaluation {
		return nil, nil
	}
	t.local[r.LocalID()].replica = r // for the model's own all-reduces
	m := t.micro(r, b, i)
	m.Last = true
	if _, err := t.program.Gradients(ctx, r.LocalID(), m, nil); err != nil {
		return nil, fmt.Errorf("gradients: %w", err)
	}
	gradients = make([]*tensor.Tensor, len(t.Parameters()))
	for k := range gradients {
		if gradients[k], err = t.program.Gradient(r.LocalID(), k); err != nil {
			return nil, fmt.Errorf("the gradient of %s: %w", t.Parameters()[k].Name, err)
		}
	}
	return gradients, nil
}

// conclude selects the first cause, on the first replica that has it. whole reports whether the step was computed as
// one program, unlike the findings.
func (e *NotFiniteError) conclude(byReplica []finding, parameters []engine.Variable, codec compress.Codec,
	norm string, whole bool,
) {
	e.Replica, e.Example, e.Batch = -1, -1, -1
	e.Detail = "every replica's share is finite: use a smaller learning rate, or a loss that cannot overflow"
	first, sum := finding{Cause: causeNone}, -1
	for replica, f := range byReplica {
		if f.Cause < first.Cause {
			first, e.Replica, e.Example, e.Batch, e.Detail = f, replica, f.Example, f.Batch, f.Detail
		}
		if f.Sum >= 0 && (sum < 0 || f.Sum < sum) {
			sum = f.Sum
		}
	}
	e.persists = first.Cause == causeVariable || first.Cause == causeFrozen
	if e.norm = first.Cause == causeNone && sum < 0 && norm != "" && finite(e.Loss); e.norm {
		e.Detail = norm + " overflows, though every gradient is finite: use a smaller loss, or clip by value"
	}
	switch {
	case first.Cause != causeNone:
	case whole:
		e.Detail = "the engine computed the step as one program; gradients and loss computed again by themselves, which " +
			"may be rounded differently, are finite: a value is at the limit of its type; use a smaller loss or learning rate"
	case sum >= 0:
		v := parameters[sum]
		e.Detail = fmt.Sprintf("each replica's gradient of %s is finite, but their sum overflows %v: use a wider "+
			"type, a smaller loss, or fewer replicas", v.Name, v.DType)
		if codec.Method == compress.Float16 {
			e.Detail = fmt.Sprintf("each replica's gradient of %s is finite, but one of them, or their sum, overflows float16, "+
				"in which Config.Exchange compresses them: use bfloat16, or a smaller loss", v.Name)
		}
	}
}

// find inspects one replica's share of a batch, after the program has computed its loss and gradients.
func (t *Trainer) find(r *distribute.Replica, g *globalBatch, gradients []*tensor.Tensor) (finding, error) {
	local := r.LocalID()
	id := t.replicaID(r)
	rows := g.rows[id]
	share := g.shares[local]
	f := finding{Example: -1}
	finiteVariables, frozen := "all variables", "" // frozen: what is wrong with the first frozen variable that has NaN
	for i, v := range t.variables {
		from, to := t.program.Kept(local, i)
		if from == to { // other devices keep it
			continue
		}
		value, err := t.program.Read(local, i)
		if err != nil {
			return f, fmt.Errorf("reading %s: %w", v.Name, err)
		}
		at := tensor.FirstNotFinite(value)
		switch {
		case at < 0:
		case v.Role == engine.Frozen: // no step caused it: an infinity may be intended, for example in an attention mask
			finiteVariables = "all variables but frozen ones"
			if at = slices.IndexFunc(value.Float64s(), math.IsNaN); at >= 0 && frozen == "" {
				frozen = fmt.Sprintf("the frozen variable %s has NaN: element %s: want numbers there",
					v.Name, position(value.Shape(), at))
			}
		default:
			f.Cause = causeVariable
			f.Detail = fmt.Sprintf("the %v %s was not finite before this step: element %s is %v, from an earlier step or "+
				"from the program: use a smaller learning rate, or clip the gradients",
				v.Role, v.Name, position(v.Shape, from+at), value.Float64s()[at])
			return f, nil
		}
	}
	if t.findElement(&f, r, g, func(weight float32) bool { return weight != 0 }) {
		return f, nil
	}
	if t.findLabel(&f, r, g, t.program.Info().Classes) {
		return f, nil
	}
	loss, bad := 0.0, -1 // of the first example whose loss is not finite
	if rows > 0 {
		losses, err := t.program.Losses(local)
		if err != nil {
			return f, err
		}
		for row := rows - 1; row >= 0; row-- {
			if share.Weights[row] != 0 && !finite(losses[row]) {
				loss, bad = losses[row], row
			}
		}
	}
	// The loss of an example of weight 0 does not count, but its gradient can be 0 times an infinity. A layer over the
	// whole batch, such as batch normalization, carries its NaN to the other examples.
	if (bad >= 0 || len(gradients) > 0) && t.findElement(&f, r, g, func(weight float32) bool { return weight == 0 }) {
		return f, nil
	}
	if frozen != "" {
		f.Cause, f.Detail = causeFrozen, frozen
		return f, nil
	}
	if bad >= 0 {
		f.Cause, f.Example = causeLoss, id*g.per+bad
		f.Detail = fmt.Sprintf("%s: its loss is %v, though its inputs and labels and %s are "+
			"finite: the model or the loss overflows, or takes the logarithm or root of an invalid number",
			g.exampleText(f.Example), loss, finiteVariables)
		return f, nil
	}
	f.Cause = causeNone
	if i := slices.IndexFunc(gradients, func(x *tensor.Tensor) bool { return tensor.FirstNotFinite(x) >= 0 }); i >= 0 {
		x, at := gradients[i], tensor.FirstNotFinite(gradients[i])
		f.Cause = causeGradient
		f.Detail = fmt.Sprintf("the gradient of %s is the first that is not finite: element %s is %v: clip "+
			"what the model divides by or takes the root or logarithm of, or use a wider type than %s",
			t.Parameters()[i].Name, position(x.Shape(), at), x.Float64s()[at], cmp.Or(t.computeName(), x.DType().String()))
	}
	return f, nil
}

// findLabel looks for a label that is not one of the model's classes, among the examples that count.
func (t *Trainer) findLabel(f *finding, r *distribute.Replica, g *globalBatch, classes []int) bool {
	id, share := t.replicaID(r), g.shares[r.LocalID()]
	for i, n := range classes {
		for row := range g.rows[id] {
			if n == 0 || share.Weights[row] == 0 {
				continue
			}
			label := share.Labels[i].Rows(row, row+1).Float64s()
			if at := slices.IndexFunc(label, func(x float64) bool { return x < 0 || x >= float64(n) }); at >= 0 {
				f.Cause, f.Example = causeLabel, id*g.per+row
				f.Detail = fmt.Sprintf("%s: label %d is %v, but the model has %d outputs for the classes: "+
					"use labels from 0 to %d, or a model with more outputs", g.exampleText(f.Example), i, label[at], n, n-1)
				return true
			}
		}
	}
	return false
}

// findElement looks for an element of an input or a label that is not finite, among the examples whose weight
// is wanted.
func (t *Trainer) findElement(f *finding, r *distribute.Replica, g *globalBatch,
	wanted func(weight float32) bool,
) bool {
	share, id := g.shares[r.LocalID()], t.replicaID(r)
	for row := range g.rows[id] {
		if !wanted(share.Weights[row]) {
			continue
		}
		for _, list := range []struct {
			kind    string
			cause   cause
			tensors []*tensor.Tensor
		}{{"input", causeInput, share.Inputs}, {"label", causeLabel, share.Labels}} {
			for i, x := range list.tensors {
				one := x.Rows(row, row+1)
				at := tensor.FirstNotFinite(one)
				if at < 0 {
					continue
				}
				f.Cause, f.Example = list.cause, id*g.per+row
				f.Detail = fmt.Sprintf("%s: %s %d is not finite: element %s is %v: fix the data, or leave the "+
					"example out",
					g.exampleText(f.Example), list.kind, i, position(one.Shape()[1:], at), one.Float64s()[at])
				return true
			}
		}
	}
	return false
}

// exampleText describes the position of an example.
func (g *globalBatch) exampleText(i int) string {
	return fmt.Sprintf("example %d (counted from 0) of batch %d of the data", i, g.position.batch+1)
}

// position formats the index of element i of a tensor with the given shape: "(2, 0)".
func position(shape []int, i int) string {
	at := make([]int, len(shape))
	for axis := len(shape) - 1; axis >= 0; axis-- {
		at[axis] = i % shape[axis]
		i /= shape[axis]
	}
	return tensor.FormatShape(at)
}
