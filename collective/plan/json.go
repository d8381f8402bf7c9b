package plan

import "encoding/json"

// diagramJSON is the form of [Diagram.MarshalJSON].
type diagramJSON struct {
	Algorithm string       `json:"algorithm"`
	Problem   problemJSON  `json:"problem"`
	Proofs    int          `json:"proofs"`
	Ranks     [][]stepJSON `json:"ranks"`
	Edges     []edgeJSON   `json:"edges"`
}

type problemJSON struct {
	Op       string  `json:"op"`
	Reduce   string  `json:"reduce,omitempty"`
	Ranks    int     `json:"ranks"`
	Count    int     `json:"count"`
	Root     *int    `json:"root,omitempty"`
	Peer     *int    `json:"peer,omitempty"`
	AnyOrder bool    `json:"any_order"`
	Domains  [][]int `json:"domains"`
	Private  bool    `json:"private"`
}

type stepJSON struct {
	Slot  int       `json:"slot"`
	Kind  string    `json:"kind"`
	Text  string    `json:"text"`
	To    *int      `json:"to,omitempty"`
	From  *int      `json:"from,omitempty"`
	Out   *spanJSON `json:"out,omitempty"`
	In    *spanJSON `json:"in,omitempty"`
	Flag  *int      `json:"flag,omitempty"`
	Holds string    `json:"holds,omitempty"`
}

type spanJSON struct {
	Buffer string `json:"buffer"`
	Begin  int    `json:"begin"` // the first element
	End    int    `json:"end"`   // after the last one
}

type edgeJSON struct {
	Kind     string `json:"kind"`
	FromRank int    `json:"from_rank"`
	FromStep *int   `json:"from_step"` // null: memory of the rank, not a step of it
	ToRank   int    `json:"to_rank"`
	ToStep   *int   `json:"to_step"`
	Count    int    `json:"count"` // elements
}

// MarshalJSON implements [json.Marshaler]: the problem, by rank the steps with what they leave in memory, and the
// dependencies between steps of different ranks. Counts and positions are in elements.
func (d *Diagram) MarshalJSON() ([]byte, error) {
	p := d.Problem
	out := diagramJSON{
		Algorithm: d.Algorithm, Proofs: d.Proofs, Ranks: make([][]stepJSON, len(d.Ranks)), Edges: []edgeJSON{},
		Problem: problemJSON{
			Op: p.Op.String(), Ranks: p.Size, Count: p.Count, AnyOrder: p.Order == Any, Domains: p.domains(),
			Private: p.Private,
		},
	}
	if p.Op.Reduces() {
		out.Problem.Reduce = p.Reduce.String()
	}
	if p.Op.Rooted() {
		out.Problem.Root = &p.Root
	}
	if p.Op == Send {
		out.Problem.Peer = &p.Peer
	}
	for rank, steps := range d.Ranks {
		out.Ranks[rank] = make([]stepJSON, len(steps))
		for i, s := range steps {
			out.Ranks[rank][i] = s.json()
		}
	}
	for _, e := range d.Edges {
		kinds := [...]string{FrameEdge: "frame", FlagEdge: "flag", ReadEdge: "read", WriteEdge: "write"}
		out.Edges = append(out.Edges, edgeJSON{
			Kind: kinds[e.Kind], FromRank: e.From.Rank, FromStep: known(e.From.Index), ToRank: e.To.Rank,
			ToStep: known(e.To.Index), Count: e.Span.length(),
		})
	}
	return json.Marshal(out)
}

// json returns the fields that have a meaning in a step of this kind.
func (s DiagramStep) json() stepJSON {
	out := stepJSON{Slot: s.Slot, Kind: s.Kind.String(), Text: s.String(), Holds: s.Holds}
	switch s.Kind {
	case Exchange:
		out.To, out.From = known(s.To), known(s.From)
		if s.To >= 0 {
			out.Out = s.Out.json()
		}
		if s.From >= 0 {
			out.In = s.In.json()
		}
	case Signal:
		out.Flag = &s.Flag
	case Await:
		out.From, out.Flag = known(s.From), &s.Flag
	case Combine:
		out.To, out.Out, out.In = known(s.To), s.Out.json(), s.In.json()
	case Pull:
		out.From, out.Out, out.In = known(s.From), s.Out.json(), s.In.json()
	case Push:
		out.To, out.Out, out.In = known(s.To), s.Out.json(), s.In.json()
	case Copy, Fold:
		out.Out, out.In = s.Out.json(), s.In.json()
	case Scale:
		out.Out = s.Out.json()
	}
	return out
}

func (s Span) json() *spanJSON { return &spanJSON{Buffer: s.Buffer.String(), Begin: s.Lo, End: s.Hi} }

// known returns nil for a rank or an index of -1.
func known(n int) *int {
	if n < 0 {
		return nil
	}
	return &n
}
