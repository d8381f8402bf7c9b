package simulate_test

import (
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/simulate"
)

// layer is a layer of a network with parameters.
type layer struct {
	parameters int
	work       float64 // multiplications of the forward pass, for one image
}

// convolution returns a layer whose output has side × side pixels.
func convolution(side, kernel, in, out int) layer { return taps(side, kernel*kernel, in, out) }

// taps returns a convolution whose kernel has this many weights for each input and output.
func taps(side, kernel, in, out int) layer {
	weights := kernel * in * out
	return layer{weights + 2*out, float64(side * side * weights)}
}

// vgg16 returns configuration D of Simonyan and Zisserman, arXiv 1409.1556, table 1.
func vgg16() (layers []layer) {
	in := 3
	for _, block := range []struct{ side, channels, count int }{
		{224, 64, 2}, {112, 128, 2}, {56, 256, 3}, {28, 512, 3}, {14, 512, 3},
	} {
		for range block.count {
			layers = append(layers, convolution(block.side, 3, in, block.channels))
			in = block.channels
		}
	}
	return append(layers, convolution(1, 1, 7*7*512, 4096), convolution(1, 1, 4096, 4096), convolution(1, 1, 4096, 1000))
}

// resnet101 returns the network of 101 layers of He et al., arXiv 1512.03385, table 1.
func resnet101() []layer {
	layers := []layer{convolution(112, 7, 3, 64)}
	in := 64
	for _, stage := range []struct{ side, channels, count int }{{56, 64, 3}, {28, 128, 4}, {14, 256, 23}, {7, 512, 3}} {
		for i := range stage.count {
			out := 4 * stage.channels
			if i == 0 {
				layers = append(layers, convolution(stage.side, 1, in, out)) // the projection beside the block
			}
			layers = append(layers, convolution(stage.side, 1, in, stage.channels),
				convolution(stage.side, 3, stage.channels, stage.channels), convolution(stage.side, 1, stage.channels, out))
			in = out
		}
	}
	return append(layers, convolution(1, 1, 2048, 1000))
}

// inceptionV3 returns the network of Szegedy et al., arXiv 1512.00567, table 1, with the channels of TensorFlow's
// benchmarks (tf_cnn_benchmarks, models/inception_model.py), which Horovod's are made with.
func inceptionV3() []layer {
	layers := []layer{
		convolution(149, 3, 3, 32), convolution(147, 3, 32, 32), convolution(147, 3, 32, 64), convolution(73, 1, 64, 80),
		convolution(71, 3, 80, 192),
	}
	in, side := 192, 35
	// branch appends layers one after the other: pairs of kernel weights and channels.
	branch := func(sizes ...int) {
		from := in
		for i := 0; i < len(sizes); i += 2 {
			layers = append(layers, taps(side, sizes[i], from, sizes[i+1]))
			from = sizes[i+1]
		}
	}
	for _, pooled := range []int{32, 64, 64} {
		branch(1, 64)
		branch(1, 48, 25, 64)
		branch(1, 64, 9, 96, 9, 96)
		branch(1, pooled)
		in = 64 + 64 + 96 + pooled
	}
	branch(1, 64, 9, 96)
	side = 17
	branch(9, 384)
	layers = append(layers, taps(side, 9, 96, 96))
	in += 384 + 96
	for _, n := range []int{128, 160, 160, 192} {
		branch(1, 192)
		branch(1, n, 7, n, 7, 192)
		branch(1, n, 7, n, 7, n, 7, n, 7, 192)
		branch(1, 192)
		in = 4 * 192
	}
	branch(1, 192)
	branch(1, 192, 7, 192, 7, 192)
	side = 8
	layers = append(layers, taps(side, 9, 192, 320), taps(side, 9, 192, 192))
	in += 320 + 192
	for range 2 {
		branch(1, 320)
		branch(1, 384)
		layers = append(layers, taps(side, 3, 384, 384), taps(side, 3, 384, 384))
		branch(1, 448, 9, 384)
		layers = append(layers, taps(side, 3, 384, 384), taps(side, 3, 384, 384))
		branch(1, 192)
		in = 320 + 2*2*384 + 192
	}
	return append(layers, convolution(1, 1, in, 1000))
}

// TestHorovod compares the scaling efficiency of simulated trainings with the published one of Horovod (Sergeev and
// Del Balso, arXiv 1802.05799, and the benchmarks in Horovod's documentation): servers with 4 Pascal GPUs each,
// joined by RoCE of 25 Gbit/s, batches of 64 a GPU. What is published is an input as it is. What is not is bounded from
// both sides: no reduction overlaps the backward pass, or each begins when its gradients are computed. No number is
// fitted. docs/simulate.md has the result.
func TestHorovod(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: simulates 36 all-reduces of up to 512 ranks")
	}
	const (
		batch      = 64       // arXiv 1802.05799
		fusion     = 64 << 20 // bytes; the default of HOROVOD_FUSION_THRESHOLD, Horovod's docs/tensor-fusion
		gpus       = 4        // of a server
		forward    = 1.0 / 3  // of a step: the backward pass computes two products for each of the forward pass
		points     = 0.05
		inLatency  = 5700 * time.Nanosecond // PCI and network, ring, protocol Simple: the first table of NCCL's
		outLatency = 6600 * time.Nanosecond // src/graph/tuning.cc (version 2.5)
	)
	networks := []struct {
		name      string
		layers    []layer
		perSecond float64         // images, on one GPU: Horovod's README of September 2017, this hardware
		published map[int]float64 // efficiency by GPUs: 16 that README, over RDMA with NCCL; 128 and 512 later ones
		within    map[int]bool    // it must be within 5 points of the one with overlap
	}{
		{
			"Inception V3", inceptionV3(), 134.4,
			map[int]float64{16: 2022.6 / 134.4 / 16, 128: 0.90, 512: 0.90},
			map[int]bool{16: true, 512: true},
		},
		{
			"ResNet-101", resnet101(), 119.4,
			map[int]float64{16: 1746.2 / 119.4 / 16, 128: 0.90, 512: 0.90},
			map[int]bool{16: true, 128: true, 512: true},
		},
		{"VGG-16", vgg16(), 130.9, map[int]float64{16: 1787.4 / 130.9 / 16, 128: 0.79, 512: 0.68}, nil},
	}
	t.Logf("%-12s %5s %10s %10s %10s", "network", "GPUs", "no overlap", "published", "overlap")
	for _, n := range networks {
		var work float64
		parameters := 0
		for _, l := range n.layers {
			work += l.work
			parameters += l.parameters
		}
		t.Logf("%s: %d parameters, %.2e multiplications", n.name, parameters, work)
		step := batch / n.perSecond
		for _, ranks := range []int{16, 128, 512} {
			c := simulate.Cluster{
				Ranks: ranks, Hosts: ranks / gpus,
				Inside:  plan.Link{Latency: inLatency, Bandwidth: 15.75e9}, // PCI Express 3.0, 16 lanes
				Outside: plan.Link{Latency: outLatency, Bandwidth: 25e9 / 8},
				Combine: 732e9, Copy: 366e9, // the memory of a Pascal P100
			}
			reduce := func(bytes int) float64 {
				p := c.Problem(plan.Problem{Op: plan.AllReduce, Count: bytes / 4, Order: plan.Any}, 4)
				r, err := simulate.Run(t.Context(), c, algorithm(t, "ring"), p, 4, nil)
				if err != nil {
					t.Fatal(err)
				}
				return r.Time.Seconds()
			}
			ready, free, alone := forward*step, 0.0, 0.0 // times of a step
			bucket := 0
			flush := func() {
				if bucket > 0 {
					took := reduce(bucket)
					free, alone = max(free, ready)+took, alone+took
				}
				bucket = 0
			}
			for i := len(n.layers) - 1; i >= 0; i-- {
				l := n.layers[i]
				if bucket+4*l.parameters > fusion {
					flush()
				}
				bucket += 4 * l.parameters
				ready += (1 - forward) * step * l.work / work
			}
			flush()
			least, most, published := step/(step+alone), step/max(step, free), n.published[ranks]
			t.Logf("%-12s %5d %8.1f %% %8.1f %% %8.1f %%", n.name, ranks, 100*least, 100*published, 100*most)
			if published < least || published > most {
				t.Errorf("%s on %d GPUs: published %.3f, simulated %.3f to %.3f", n.name, ranks, published, least, most)
			}
			if n.within[ranks] && most-published > points {
				t.Errorf("%s on %d GPUs: published %.3f, simulated %.3f, more than 5 points apart", n.name, ranks, published, most)
			}
		}
	}
}
