package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/internal/chart"
	"github.com/lockstep-ml/lockstep/internal/units"
)

// peerFile is a file of --peer.
type peerFile struct {
	name    string // of the line
	results []bench.PeerResult
}

// readPeers reads the files of --peer, each as FILE or NAME=FILE.
func readPeers(texts []string) (peers []peerFile, err error) {
	for _, text := range texts {
		name, file, named := strings.Cut(text, "=")
		if !named {
			name, file = "", text
		}
		f, err := os.Open(file)
		if err != nil {
			return nil, fmt.Errorf("--peer: %w", err)
		}
		results, format, err := bench.ReadPeer(f)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("--peer %s: %w", file, err)
		}
		if name == "" {
			name = fmt.Sprintf("%s (%s)", format, filepath.Base(file))
		}
		peers = append(peers, peerFile{name, results})
	}
	return peers, nil
}

// plotSizes draws time and bus bandwidth over the sizes, with the peers' beside them.
func plotSizes(file, op string, results []bench.Result, peers []peerFile) error {
	first := results[0]
	own := chart.Line{Name: fmt.Sprintf("lockstep, %s over %s", cli.Count(first.Ranks, "rank"), first.Transport)}
	limit := chart.Line{Name: "plain copies on this machine", Limit: true}
	bus, busLimit := chart.Line{Name: own.Name}, chart.Line{Name: "plain copies on this machine", Limit: true}
	share := 0.0 // busbw by algbw, which depends on the operation and the ranks only
	for _, r := range results {
		size := float64(r.Bytes)
		own.X, own.Y = append(own.X, size), append(own.Y, micros(r.Median))
		bus.X, bus.Y = append(bus.X, size), append(bus.Y, r.BusBW)
		if r.AlgBW > 0 {
			share = r.BusBW / r.AlgBW
		}
		if r.Limit > 0 {
			limit.X, limit.Y = append(limit.X, size), append(limit.Y, micros(r.Limit))
			busLimit.X = append(busLimit.X, size)
			busLimit.Y = append(busLimit.Y, r.BusBW*float64(r.Median)/float64(r.Limit))
		}
	}
	times, rates := []chart.Line{own}, []chart.Line{bus}
	for _, p := range peers {
		t, b := chart.Line{Name: p.name}, chart.Line{Name: p.name}
		for _, r := range p.results {
			size := float64(r.Bytes)
			if r.PerRank {
				size *= float64(first.Ranks)
			}
			t.X, t.Y = append(t.X, size), append(t.Y, micros(r.Median))
			rate := r.BusBW
			if rate == 0 { // OSU prints times only
				rate = share * size / float64(r.Median)
			}
			b.X, b.Y = append(b.X, size), append(b.Y, rate)
		}
		times, rates = append(times, t), append(rates, b)
	}
	if len(limit.X) > 0 {
		times, rates = append(times, limit), append(rates, busLimit)
	}
	svg, err := chart.Draw(fmt.Sprintf("Time and bus bandwidth of %s over the size, %s", op, own.Name),
		chart.Options{},
		chart.Chart{
			Title: "Time of a call: " + op, X: "size of the whole vector", Y: "time (median)", LogX: true, LogY: true,
			StepX: 16, FormatX: shortBytes, FormatY: shortMicros, Lines: times,
		},
		chart.Chart{
			Title: "Bus bandwidth", X: "size of the whole vector", Y: "GB/s", LogX: true, StepX: 16, FormatX: shortBytes,
			Lines: rates, FromZero: true,
		})
	if err != nil {
		return err
	}
	return cli.WriteFile(file, svg)
}

// shortBytes formats a size at an axis.
func shortBytes(x float64) string { return units.Bytes(int(x)) }

// shortMicros formats a number of microseconds at an axis.
func shortMicros(x float64) string { return time.Duration(x * float64(time.Microsecond)).String() }
