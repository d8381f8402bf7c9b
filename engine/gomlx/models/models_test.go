package models_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestModels(t *testing.T) {
	for _, test := range []struct {
		name       string
		forward    models.Forward
		shape      []int
		parameters int // those of the same network elsewhere
		outputs    int
	}{
		{"mlp", models.MLP{}.Forward, []int{28, 28, 1}, 669706, 10},
		{"mlp of flat rows", models.MLP{}.Forward, []int{784}, 669706, 10},
		{"small mlp", models.MLP{Hidden: []int{32}, Classes: 4}.Forward, []int{8, 8, 1}, 64*32 + 32 + 32*4 + 4, 4},
		{"linear", models.MLP{Hidden: []int{}, Classes: 4}.Forward, []int{5}, 24, 4},
		{"cnn", models.CNN{}.Forward, []int{28, 28, 1}, 225034, 10},
		{
			"cnn of odd images", models.CNN{Same: true, Classes: 2, Dropout: 0.5}.Forward,
			[]int{9, 7, 3},
			32*28 + 64*289 + 128*(2*64+1) + 2*129, 2,
		},
		{
			"gpt", models.GPT{}.Forward,
			[]int{64},
			// PyTorch's modules: two embeddings, four blocks, a last norm and a head.
			256*128 + 64*128 + 4*(2*256+129*384+129*128+129*512+513*128) + 256 + 128*256, 256,
		},
		{
			"gpt of other sizes", models.GPT{Vocabulary: 11, Width: 6, Heads: 3, Blocks: 1}.Forward,
			[]int{5},
			11*6 + 5*6 + 2*12 + 7*18 + 7*6 + 7*24 + 25*6 + 12 + 6*11, 11,
		},
		{
			"resnet", models.ResNet{}.Forward,
			[]int{32, 32, 3},
			// Convolutions with biases, and two vectors of each normalisation.
			16*28 + 2*16 + 6*(16*145+2*16) + 32*17 + 6*(32*289+2*32) + 64*33 + 6*(64*577+2*64) + 65*10, 10,
		},
		{
			"resnet of tiny images", models.ResNet{Filters: []int{2, 4}, Blocks: 1, Classes: 3}.Forward,
			[]int{1, 5, 1},
			2*10 + 2*2 + 2*(2*19+2*2) + 4*3 + 2*(4*37+2*4) + 5*3, 3,
		},
		{"cnn that pads", models.CNN{Same: true}.Forward, []int{8, 8, 1}, 32*10 + 64*289 + 128*(256+1) + 10*129, 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			input, label := engine.Feature{DType: tensor.Float32, Shape: test.shape}, engine.Feature{DType: tensor.Int32}
			output := []int{2}
			if strings.HasPrefix(test.name, "gpt") {
				input.DType, label.Shape, output = tensor.Int32, test.shape, append(output, test.shape...)
			}
			e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			m := &gomlx.Model{
				Forward: test.forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits,
				Optimizer: optimizer.Adam().Done(),
			}
			p, err := m.Compile(t.Context(), e, engine.Spec{
				Rows: 2, Seed: 1, Devices: e.Devices(),
				Inputs: []engine.Feature{input}, Labels: []engine.Feature{label},
			})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			n := 0
			for _, v := range p.Parameters() {
				n += tensor.New(v.DType, v.Shape...).Len()
			}
			if n != test.parameters {
				t.Errorf("%d parameters, want %d", n, test.parameters)
			}
			out, err := p.Predict(t.Context(), 0,
				[]*tensor.Tensor{tensor.New(input.DType, append([]int{2}, test.shape...)...)})
			if err != nil {
				t.Fatal(err)
			}
			if want := append(output, test.outputs); len(out) != 1 || !slices.Equal(out[0].Shape(), want) {
				t.Errorf("predicted %v, want one tensor of shape %v", out, want)
			}
		})
	}
}
